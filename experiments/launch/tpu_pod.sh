#!/bin/bash
# A run on a spot pod of TPUs, by gcloud (528) alone. Each word is a step:
#
#   export ZONE=us-west4-a CHIPS=v5litepod-16 RUNTIME=v2-alpha-tpuv5-lite CODE=URL
#   experiments/launch/tpu_pod.sh disk       # once: one that all hosts see
#   experiments/launch/tpu_pod.sh pod        # and after preemption, as the next two
#   experiments/launch/tpu_pod.sh install
#   experiments/launch/tpu_pod.sh run grpo ... --out grpo
#
# v5p has the runtime v2-alpha-tpuv5, and v6e v2-alpha-tpuv6e. CODE is the address of a git
# repository. Put prompts into /runs on the disk, where the run is too.
set -euo pipefail
step=${1:?expected disk, pod, install or run}
shift

on() {
    gcloud compute tpus tpu-vm ssh rlhf --zone="$ZONE" --worker="$1" --command="$2"
}

case $step in
disk)
    gcloud filestore instances create runs --zone="$ZONE" --tier=BASIC_SSD \
        --file-share=name=runs,capacity=2560GB --network=name=default
    ;;
pod)
    # A pod that was preempted is still listed, and keeps the name.
    if gcloud compute tpus queued-resources describe rlhf --zone="$ZONE" > /dev/null; then
        gcloud compute tpus queued-resources delete rlhf --zone="$ZONE" --force --quiet
    fi
    gcloud compute tpus queued-resources create rlhf --node-id=rlhf --zone="$ZONE" --spot \
        --accelerator-type="$CHIPS" --runtime-version="$RUNTIME"
    echo "wait until it is ACTIVE: gcloud compute tpus queued-resources list --zone=$ZONE"
    ;;
install)
    address=$(gcloud filestore instances describe runs --zone="$ZONE" \
        --format='value(networks[0].ipAddresses[0])')
    on all "sudo apt-get install -y nfs-common && sudo mkdir -p /runs &&
        sudo mount $address:/runs /runs && sudo chmod 777 /runs"
    # On the disk, Python too: the pod's own is 3.10.
    # A preemption may have stopped it halfway: only what has an end is left as it is.
    on 0 "test -e /runs/venv/installed || { rm -rf /runs/code /runs/venv &&
        git clone $CODE /runs/code && cd /runs/code &&
        pip install uv && export UV_PYTHON_INSTALL_DIR=/runs/python PATH=~/.local/bin:\$PATH &&
        uv venv --python 3.12 /runs/venv &&
        uv pip install --python /runs/venv -c .ci/constraints.txt 'jax[tpu]' . &&
        touch /runs/venv/installed; }"
    ;;
run)
    # It outlives the connection. --resume starts a run that is not there yet.
    on all "cd /runs && nohup venv/bin/rlhf-jax $(printf '%q ' "$@")--resume \
        --coordinator auto > \$(hostname).log 2>&1 < /dev/null &"
    ;;
*)
    echo "expected disk, pod, install or run, got '$step'; give one" >&2
    exit 2
    ;;
esac
