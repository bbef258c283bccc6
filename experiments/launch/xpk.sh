#!/bin/bash
# A run on a spot slice of TPUs in Google Kubernetes Engine, by XPK 1.16.0, which writes the
# JobSet. The image is .ci/docker/Dockerfile with JAX=tpu. Once, the cluster and a disk of
# all hosts, as a run of several processes writes to no bucket:
#
#   export CLUSTER=rlhf ZONE=us-west4-a PROJECT=mine IMAGE=gcr.io/mine/rlhf-jax:tpu
#   xpk cluster create --cluster $CLUSTER --zone $ZONE --project $PROJECT --spot \
#       --tpu-type v5litepod-16 --enable-gcpfilestore-csi-driver
#   xpk storage create runs --cluster $CLUSTER --zone $ZONE --project $PROJECT \
#       --type gcpfilestore --vol runs --tier BASIC_HDD --size 1024 \
#       --access-mode ReadWriteMany --mount-point /runs --readonly false --auto-mount true
#
# Then the folder of the run, the method and its options, without --out and --resume; with
# XPK_FLAGS=--dry-run it only prints what it would do:
#
#   experiments/launch/xpk.sh /runs/grpo grpo --model Qwen/Qwen2.5-0.5B \
#       --prompts /runs/prompts.jsonl --verifier gsm8k --placement.policy fsdp=16
set -euo pipefail
out=${1:?expected the folder of the run, the method and its options}
shift

# A pod that is evicted has five minutes to save. XPK starts again what ends with a status
# of 127 to 255: saved upon a signal (143), or ended with a host that is lost (134).
# shellcheck disable=SC2086
xpk workload create --cluster "$CLUSTER" --zone "$ZONE" --project "$PROJECT" --spot \
    --workload rlhf-jax --tpu-type v5litepod-16 --docker-image "$IMAGE" --storage runs \
    --max-restarts 50 --termination-grace-period-seconds 300 ${XPK_FLAGS:-} \
    --command "rlhf-jax $(printf '%q ' "$@")--out $out --resume --coordinator auto"
