"""Options that trainers refuse, with one message and status 2."""

import bad_inputs
import pytest
from bad_inputs import TRAINERS, case
from tiers import one_in

ABOVE_0 = "expected a finite number above 0, got"
NOT_BELOW_0 = "expected a finite number, 0 or more, got"
NO_FOLDER = "'/nowhere'; that looks like a path, and there is no such folder"
DEVICES = "expected axes that multiply to the 8 devices, got data="
CHOICE = "error: {1}: expected one of .*, got '{0}'; choose one"
WHOLE = "error: {}: expected a whole number( or None)?, got '{}'; "
MESH = "mesh: expected sizes of dcn, data, fsdp, expert, context, tensor,"
PLACE = (
    "place: expected policy, AXIS=SIZE,..., last, last:AXIS=SIZE,..., "
    "hosts:AXIS=SIZE,..., cpu or, of a sampler, auto,"
)

# Of every trainer.
EVERYWHERE = [
    ("--seed=-1", "--seed: expected a number of at least 0 .*4294967295, got -1"),
    ("--seed=4294967296", "--seed: .* of at most 4294967295, got 4294967296"),
    ("--seed=x", WHOLE.format("--seed", "x")),
    ("--seed=1.5", WHOLE.format("--seed", "1.5")),
    ("--seed", "error: --seed: expected a value, got none; write it after"),
    ("--seed=" + 5000 * "9", "error: --seed: expected a whole number, got "),
    (
        "--snapshot-every=0",
        "--snapshot-every: expected a whole number, 1 or more, got 0",
    ),
    (
        "--keep-snapshots=0",
        "--keep-snapshots: expected a whole number, 1 or more, got 0",
    ),
    ("--resume-from=-1", "--resume-from: expected a number of at least 0, got -1"),
    ("--resume=maybe", "expected options of .*, got 'maybe'; "),
    ("--no-such=1", "expected options of .*, got '--no-such=1'; "),
    ("stray", "expected options of .*, got 'stray'; "),
    ("--dtype=float16", CHOICE.format("float16", "--dtype")),
    ("--remat=some", CHOICE.format("some", "--remat")),
    ("--attention=flash", CHOICE.format("flash", "--attention")),
    ("--attention=cudnn", "expected dtype bfloat16 with attention cudnn"),
    ("--overlong=keep", CHOICE.format("keep", "--overlong")),
    ("--placement.policy=3", f"{MESH} .* got '3'"),
    ("--placement.policy=width=2", f"{MESH} .* got 'width=2'"),
    ("--placement.policy=data=2,data=4", f"{MESH} .* got 'data=2,data=4'"),
    ("--placement.policy=data=-1", f"{MESH} .* got 'data=-1'"),
    ("--placement.policy=data=0", "mesh data: expected at least 1 device, got 0"),
    ("--placement.policy=data=3", f"{DEVICES}3 "),
    ("--placement.policy=data=16", f"{DEVICES}16 "),
    ("--num-steps=0", f"--num-steps: {ABOVE_0} 0"),
    ("--num-steps=x", WHOLE.format("--num-steps", "x")),
    ("--num-steps=" + 20 * "9", "--num-steps: expected a whole number of at most 2"),
    ("--resume-from=3", "--resume: expected a run folder, with config.json"),
    ("--batch-size=0", f"--batch-size: {ABOVE_0} 0"),
    ("--batch-size=1000000000", "--batch-size: expected at most 1048576 rows"),
    ("--batch-size=-4", f"--batch-size: {ABOVE_0} -4"),
    ("--batch-size=1.5", WHOLE.format("--batch-size", "1.5")),
    ("--model=nowhere", "error: --model: expected .* no such folder in .*correct"),
    ("--model=/nowhere", f"error: --model: .* {NO_FOLDER}"),
    ("--tokenizer=/nowhere", f"error: --tokenizer: .* {NO_FOLDER}"),
    ("--model={}/sft.jsonl", "sft.jsonl', which is a file; give the folder"),
    ("--tokenizer={}/sft.jsonl", "sft.jsonl', which is a file; give the folder"),
    ("--model={}/empty", "empty: expected config.json, got a folder with"),
    ("--tokenizer={}/empty", "empty: expected a folder with tokenizer.json"),
    ("--config=/nowhere.json", "/nowhere.json: .* cannot be read: No such file"),
    ("--config={}", "expected a name that ends in .toml, .yaml, .yml or .json, got"),
    (
        "--config={}/text.txt",
        "text.txt: expected a name that ends in .toml, .yaml, .yml or .json, got ",
    ),
]
LEARNING = [
    *(("--learning-rate=0", f"--learning-rate: {ABOVE_0} 0"),),
    *(("--learning-rate=nan", f"--learning-rate: {ABOVE_0} nan"),),
    *(("--learning-rate=inf", f"--learning-rate: {ABOVE_0} inf"),),
    *(
        (
            "--learning-rate=1e-50",
            "--learning-rate: expected a number that float32 holds",
        ),
    ),
]
PACKED = [
    ("--packing=on", "--packing: expected one of auto, None, got 'on'"),
    ("--packing-width=99", "got --packing-width; write --packing auto,width=VALUE"),
    (
        "--packing=auto,width=1",
        "width of --packing: expected a number of at least ., got 1; the longest p",
    ),
    (
        "--packing=auto,width=12,max_tokens_per_device=11",
        "max_tokens_per_device of --packing: expected a number of at least 12, got 11",
    ),
]
OWN = {
    "sft": [
        *LEARNING,
        ("--schedule=cosine,warmup=1", "--schedule: warmup: .* below 1, got 1.0"),
        ("--schedule=linear,warmup=nan", "--schedule: warmup: .* below 1, got nan"),
        ("--schedule=sine", "--schedule.* constant, linear, cosine, wsd, got 'sine'"),
        ("--schedule=linear,end=-1", "--schedule: end: .* from 0 to 1, got -1"),
        ("--schedule=cosine,end=nan", "--schedule: end: .* from 0 to 1, got nan"),
        ("--schedule=wsd,decay=2", "--schedule: decay: .* from 0 to 1, got 2"),
        ("--schedule=wsd,warmup=0.6,decay=0.5", "--schedule: warmup: .* 0.5, got 0.6"),
        ("--optimizer=adam,weight_decay=1", "weight_decay"),
        ("--optimizer=adam,b1=1", "--optimizer: b1: .* below 1, got 1"),
        ("--optimizer=adafactor,momentum=1", "--optimizer: momentum: .* below 1"),
        ("--optimizer=muon,beta=1", "--optimizer: beta: .* below 1, got 1"),
        ("--optimizer=muon,ns_steps=0", "--optimizer: ns_steps: .* 1 or more, got 0"),
        ("--texts=book", "--texts: expected NAME=SOURCE, got 'book'"),
        ("--held-out-every=0", f"--held-out-every: {ABOVE_0} 0"),
        ("--reference-storage.dtype=int8", "--reference-storage: expected --lora"),
        ("--lora=17", "rank.* 17"),
        ("--max-grad-norm=0", f"--max-grad-norm: {ABOVE_0} 0"),
        ("--held-out=1", "--held-out: .* below 1, got 1.0"),
        ("--held-out=-0.5", "--held-out: .* of at least 0 .*, got -0.5"),
        ("--held-out=nan", "--held-out: .* below 1, got nan"),
        ("--held-out=0.999", "expected rows to train on beside 12 held out"),
        ("--max-length=0", "--max-length: expected a whole number, 1 or more, got 0"),
        ("--max-length=-1", "--max-length: expected a whole number, 1 or more, got -1"),
        ("--max-length=3", "sft.jsonl:1: expected at most 3 tokens, got 8"),
        (
            "--max-length=17",
            "--max-length: expected a number of at most 16, got 17; the model",
        ),
        ("--row-width=0", f"--row-width: {ABOVE_0} 0"),
        ("--row-width=4", "sft.jsonl:1: expected at most 4 tokens, .* packed row"),
        (
            "--row-width=16 --buckets 16",
            "--row-width cannot be combined with --buckets",
        ),
        ("--buckets 4", "sft.jsonl:1: expected at most 4 tokens, the largest bucket"),
        ("--buckets x", "--buckets"),
        ("--micro-batch-size=3", "expected --micro-batch-size to divide the 4 rows"),
        ("--micro-batch-size=0", "expected --micro-batch-size to divide the 4 rows"),
        ("--prompt-field=q", "sft.jsonl:1: expected a field 'q', got 'prompt'"),
        ("--response-field=a", "sft.jsonl:1: expected a field 'a', got 'prompt'"),
        (
            "--placement.policy=data=8",
            "a batch size that the 8 devices .* divide, got 4",
        ),
        ("--data=/nowhere.txt", "/nowhere.txt: expected a readable file, got No such"),
    ],
    "reward_model": [
        *LEARNING,
        ("--max-grad-norm=-1", f"--max-grad-norm: {ABOVE_0} -1"),
        ("--normalise=samples,num_samples=0", f"num_samples: {ABOVE_0} 0"),
        ("--normalise=samples,max_new_tokens=0", f"max_new_tokens: {ABOVE_0} 0"),
        (
            "--normalise=samples,max_new_tokens=16",
            "--max-new-tokens: expected a number below 16",
        ),
        (
            "--normalise=samples,max_new_tokens=15",
            "expected a prompt of at most 1 tokens to sample",
        ),
        ("--normalise=samples,temperature=0", f"temperature: {ABOVE_0} 0"),
        ("--normalise=samples,temperature=nan", f"temperature: {ABOVE_0} nan"),
        ("--normalise=std", "--normalise.* samples, demonstrations, None, got 'std'"),
        ("--normalise=demonstrations", "--normalise.* source"),
        ("--lora=17", "rank.* 17"),
        ("--margin-field=m", "reward_model.jsonl:1: expected a finite float32 .*'m'"),
        ("--max-length=0", "--max-length: expected a whole number, 1 or more, got 0"),
        ("--max-length=3", "reward_model.jsonl:1: expected at most 3 tokens, got 5"),
        (
            "--max-length=17",
            "--max-length: expected a number of at most 16, got 17; the model",
        ),
        ("--held-out=1", "--held-out: .* below 1, got 1.0"),
        ("--held-out=nan", "--held-out: .* below 1, got nan"),
        ("--placement.policy=data=8", "batch size that the 8 devices .* divide, got 4"),
    ],
    "ppo": [
        ("--surrogate=clip,clip_range=-1", "clip_range: expected"),
        ("--surrogate=clip,clip_range=nan", "clip_range: expected"),
        ("--surrogate=clip,dual_clip=1", "dual_clip: expected"),
        ("--surrogate=cispo,dual_clip=3", "--surrogate: .* got 'dual_clip=3'; "),
        ("--surrogate=dppo,cap=1", "cap: expected a number above 1"),
        ("--surrogate=vespo,decay_pos=0", "decay_pos: expected"),
        ("--off-policy-mask=0", "--off-policy-mask: expected"),
        ("--entropy-control=0", "target: expected"),
        (
            "--entropy-control=0.2,largest=0.5 --entropy-coef=0.6",
            "--entropy-coef: expected a number of at most 0.5, got 0.6; --entropy-",
        ),
        ("--token-choice=top_entropy,share=0", "share: expected"),
        ("--token-choice=clip_cov,low=5", "high: expected a number above 5"),
        ("--gradient-penalty=0", "strength: expected a finite number above 0"),
        (
            "--penalty.reference-share=1",
            "--penalty.reference-share: expected a number above 0 and below 1",
        ),
        ("--penalty.tail=sampled", "--penalty.tail: expected bucket without --penal"),
        (
            "--surrogate=ppo",
            "clip, cispo, sapo, dppo, gmpo, vespo, topr, dar, centred, got 'ppo'",
        ),
        ("--surrogate=dar,beta=0", "beta: expected a finite number above 0"),
        ("--surrogate=centred,floor=0.5", "floor: expected none without a cap"),
        (
            "--surrogate=centred,top_k=999",
            "top_k of surrogate: .* at most 24, got 999; the vocabulary has no more",
        ),
        (
            "--surrogate=centred,top_k=2 --continuous-batching=2",
            "--continuous-batching: expected none with surrogate centred, as no likel"
            "iest tokens are recorded then, got 2; leave one of them out",
        ),
        (
            "--surrogate=centred,top_k=2 --token-choice=top_entropy",
            "--token-choice: expected none with surrogate centred, which reads the",
        ),
        ("--gamma=1.5", "--gamma: expected"),
        ("--ptx-batch-size=0", f"--ptx-batch-size: {ABOVE_0} 0"),
        ("--ptx-max-length=0", f"--ptx-max-length: {ABOVE_0} 0"),
        (
            "--surrogate=dar --max-staleness=1",
            "--surrogate dar: expected --sampler-correction ratio, as --max-stal",
        ),
        (
            "--surrogate=dar --sampler-correction=truncate,cap=3",
            "--sampler-correction: expected none .* got truncate,cap=3; leave one",
        ),
        ("--gamma=nan", "--gamma: expected"),
        ("--lam=2", "--lam: expected"),
        ("--vf-coef=-1", "--vf-coef: expected"),
        ("--value-clip-range=0", "--value-clip-range: expected"),
        ("--num-epochs=0", "--num-epochs: expected"),
        ("--num-minibatches=0", f"--num-minibatches: {ABOVE_0} 0"),
        ("--num-minibatches=3", "num-minibatches to divide the 4 rows"),
        ("--temperature=nan", "--temperature: expected"),
        ("--temperature=1e-50", "--temperature: expected a number that float32 holds"),
        ("--temperature=inf", "--temperature: expected"),
        ("--kl-coef=nan", f"--kl-coef: {NOT_BELOW_0} nan"),
        ("--kl-coef=inf", f"--kl-coef: {NOT_BELOW_0} inf"),
        ("--kl-coef=1e39", "--kl-coef: expected a number that float32 holds"),
        ("--learning-rate=0", f"--learning-rate: {ABOVE_0} 0"),
        ("--critic.learning-rate=nan", f"--critic.learning-rate: {ABOVE_0} nan"),
        ("--max-grad-norm=0", f"--max-grad-norm: {ABOVE_0} 0"),
        ("--drift-every=0", f"--drift-every: {ABOVE_0} 0"),
        ("--eval-every=0", f"--eval-every: {ABOVE_0} 0"),
        ("--text-rows=0", f"--text-rows: {ABOVE_0} 0"),
        ("--held-out-rows=0", f"--held-out-rows: {ABOVE_0} 0"),
        ("--num-shown=-1", f"--num-shown: {NOT_BELOW_0} -1"),
        ("--stop-timeout=0", f"--stop-timeout: {ABOVE_0} 0"),
        ("--stop-timeout=nan", f"--stop-timeout: {ABOVE_0} nan"),
        ("--critic-warmup=1", "--critic-warmup: expected a number below 1, got 1"),
        ("--critic-warmup=-1", f"--critic-warmup: {NOT_BELOW_0} -1"),
        ("--ptx-coef=0.1", "--ptx-coef: expected --ptx with it"),
        ("--ptx=x.jsonl", "--ptx: expected --ptx-coef with it"),
        (
            "--whiten-advantages=minibatch --max-staleness=1 --num-steps=2",
            "--whiten-advantages minibatch cannot be combined with --max-staleness, "
            "because",
        ),
        ("--fixed-length=9 --max-new-tokens=9", "truncate_after .* below 9, got 9"),
        (
            "--scores.overlong-penalty=1 --scores.overlong-after=9 "
            "--scores.overlong-buffer=1 --max-new-tokens=9",
            "--scores.overlong-after: expected a number below 9, got 9",
        ),
        ("--max-new-tokens=16", "--max-new-tokens: expected a number below 16"),
        ("--max-new-tokens=0", f"--max-new-tokens: {ABOVE_0} 0"),
        ("--kl-control=adaptive", "--kl-control.*target"),
        ("--kl-control=none", "--kl-control.* adaptive, .*, got 'none'"),
        ("--kl-control=fixed,target=6", "--kl-control.*target"),
        ("--penalty.value-estimator=k9", "--penalty.value-estimator"),
        (
            "--penalty.placement=None --kl-coef=0.1",
            "--penalty.placement None cannot be combined with --kl-coef 0.1, because "
            "the KL is",
        ),
        ("--lifecycle.move=mix,every=3", "rate"),
        ("--lora=0", "rank: expected|rank to be"),
        ("--lora=17", "rank.* 17"),
        ("--lora=1000000", "rank.* 1000000"),
        (
            "--sample-reference --lora=2",
            "--sample-reference cannot be combined with --lora",
        ),
        (
            "--num-alternatives=2 --lora=2",
            "--num-alternatives cannot be combined with --l",
        ),
        (
            "--sample-reference --reference=none --kl-coef=0",
            "--sample-reference cannot be combined with --reference none, because "
            "the reference",
        ),
        (
            "--num-alternatives=2 --placement.sampler=last:data=1",
            r"--num-alternatives cannot be combined with a stale sampler "
            r"\(--max-staleness, --placement.sampler last or hosts\)",
        ),
        ("--num-alternatives=-1", "--num-alternatives: .*-1"),
        ("--reference-storage.dtype=int4", "--reference-storage.dtype"),
        ("--placement.reference=disk", f"{PLACE}.* got 'disk'"),
        ("--placement.sampler=last:data=9", "devices"),
        (
            "--placement.critic=last:data=0",
            "mesh data: expected at least 1 device, got 0",
        ),
        ("--placement.critic=cpu", "--placement.critic: expected policy, last:"),
        ("--placement.sampler=cpu", "--placement.sampler: expected policy, AXIS=SIZE"),
        ("--placement.sampler=tensor=3", "--placement.sampler: mesh: expected axes"),
        ("--judge=nope", "expected module:function, got 'nope'"),
        ("--judge=no_such:f", "expected a module no_such, .*ModuleNotFoundError"),
        ("--judge=json:__doc__", "expected a function __doc__ in .*, got str"),
        ("--reward=:f", "expected module:function, got ':f'"),
        ("--reward=m:", "expected module:function, got 'm:'"),
        ("--reward=json:decoder", "expected a function decoder in .*, got module"),
        ("--reward=json:nothing", "expected a function nothing in .* no such name"),
        ("--reward=math:pi", "expected a function pi in .*, got float"),
        ("--reward-model=x", "got --reward-model and --reward; put several rewards"),
        ("--reward=None --rewards left_out=length", "a name other than left_out, as"),
        (
            "--reward=None --reward-model=/nowhere",
            f"error: --reward-model: .* {NO_FOLDER}",
        ),
        ("--reward=None --reward-model={}/scorer+/nowhere", NO_FOLDER),
        (
            "--reward=None --reward-model=a+a",
            "different checkpoints with . between them, got .a.a",
        ),
        (
            "--reward=None --reward-model=a+",
            "different checkpoints with . between them, got .a.",
        ),
        (
            "--reward=None --reward-model=a,combine=minimum",
            "combine=minimum: expected several checkpoints A.B with it",
        ),
        (
            "--reward=None --reward-model=a+b,std_coef=1",
            "std_coef= of a reward model: expected combine=mean_minus_std",
        ),
        (
            "--reward=None --reward-model=a+b,combine=mean,risk=1",
            "risk= of a reward model: expected combine=entropic",
        ),
        (
            "--reward=None --reward-model=a+b,combine=mean_minus_std,std_coef=-1",
            "std_coef: expected a finite number, 0 or more, got -1",
        ),
        (
            "--reward=None --reward-model=a+b --critic.start=reward_model",
            "reward_model cannot be combined with several reward models, because the "
            "critic st",
        ),
        ("--reward=None --reward-model={}/model", "expected the architecture GPT2For"),
        ("--model={}/scorer", "expected the architecture GPT2LMHead"),
        ("--reference={}/scorer", "expected the architecture GPT2LMHead"),
        ("--reference=/nowhere", f"error: --reference: .* {NO_FOLDER}"),
        ("--held-out=/nowhere.txt", "/nowhere.txt: expected a readable file"),
        ("--texts=own=/nowhere.txt", "/nowhere.txt: expected a readable file"),
        ("--prompt-field=q", "ppo.jsonl:1: expected a field 'q', got 'prompt'"),
        ("--whiten-ddof=2", "--whiten-ddof"),
        ("--whiten-rewards=minibatch", "--whiten-rewards: expected 'rollout' or None"),
        ("--optimizer=torch", "--optimizer.* adafactor, muon.*, got 'torch'"),
        (
            "--critic.optimizer=builtins:id",
            "--critic.optimizer: builtins:id: expected a function of a learning rate",
        ),
        ("--critic.schedule=linear,warmup=1", "--critic.schedule: warmup: .* below 1"),
        (
            "--critic.start=scratch",
            "a folder with a checkpoint or a hub id, got .scratch",
        ),
        ("--aggregation=sum", "--aggregation"),
        *PACKED,
    ],
    "grpo": [
        *LEARNING,
        *PACKED,
        ("--group-size=0", "--group-size: expected"),
        ("--group-size=1", "--group-size: expected"),
        ("--group-size=3", "--group-size: expected to divide the 4 rows of a batch"),
        ("--kl-coef=-1", f"--kl-coef: {NOT_BELOW_0} -1"),
        ("--kl-coef=nan", f"--kl-coef: {NOT_BELOW_0} nan"),
        (
            "--aggregation=constant --loss-scale-factor=1e39",
            "--loss-scale-factor: expected a number that float32 holds",
        ),
        ("--reference=other", "a folder with a checkpoint or a hub id, got .other"),
        (
            "--reference=none --kl-coef=0.1",
            "none cannot be combined with --kl-coef 0.1",
        ),
        ("--template=hi", "--template: expected {prompt} where the prompt is to stand"),
        ("--template=", "--template: expected {prompt} where the prompt is to stand"),
        ("--chat", "chat template"),
        (
            "--verifier=gsm8k,unmarked=right",
            "expected unmarked to be wrong or last_number, got .right",
        ),
        ("--max-new-tokens=0", f"--max-new-tokens: {ABOVE_0} 0"),
        ("--max-new-tokens=16", "--max-new-tokens: expected a number below 16"),
        ("--max-new-tokens=1000000000", "--max-new-tokens: expected a number below 16"),
        ("--num-workers=0", f"--num-workers: {ABOVE_0} 0"),
        ("--num-workers=-1", f"--num-workers: {ABOVE_0} -1"),
        ("--timeout=0", f"--timeout: {ABOVE_0} 0"),
        ("--timeout=nan", f"--timeout: {ABOVE_0} nan"),
        ("--stop-timeout=0", f"--stop-timeout: {ABOVE_0} 0"),
        ("--on-failure=one", CHOICE.format("one", "--on-failure")),
        ("--held-out-rows=0", f"--held-out-rows: {ABOVE_0} 0"),
        ("--prompt-field=q", "grpo.jsonl:1: expected a field 'q', got 'question'"),
        ("--verifier=gsm8k,answer_field=a", "grpo.jsonl:1: expected .*'a'"),
        ("--baseline=mean", "--baseline"),
        ("--normalise=std", "--normalise"),
        (
            "--normalise=group --baseline=leave_one_out",
            "--normalise: expected 'rollout' or None with baseline 'leave_one_out'",
        ),
        ("--num-epochs=0", "--num-epochs: expected"),
        ("--num-minibatches=3", "num-minibatches to divide"),
        ("--surrogate=sapo,clip_range=1", "--surrogate: .* got 'clip_range=1'"),
        ("--temperature=0", "--temperature: expected"),
        ("--temperature=inf", "--temperature: expected"),
        ("--held-out=/nowhere.jsonl", "/nowhere.jsonl: expected a readable file"),
        ("--penalty.value-estimator=k4", "--penalty.value-estimator"),
        ("--placement.policy=data=8", "devices"),
    ],
    "dpo": [
        *LEARNING,
        ("--beta=-1", "--beta: expected a finite number above 0, got -1"),
        ("--beta=nan", "--beta: expected a finite number above 0, got nan"),
        ("--beta=inf", "--beta: expected a finite number above 0, got inf"),
        ("--label-smoothing=-0.1", "--label-smoothing: expected a number of at"),
        ("--label-smoothing=nan", "--label-smoothing: expected a number of at"),
        ("--kind=bco", CHOICE.format("bco", "--kind")),
        (
            "--kind=kto --data={}/one_prompt.jsonl",
            "expected completions of at least 2 prompts, .* got 1",
        ),
        (
            "--kind=kto --label-smoothing=0.1",
            "--label-smoothing: expected none with",
        ),
        ("--kind=robust", "--label-smoothing: expected a number above 0 with kind"),
        (
            "--kind=simpo --reference={}/model",
            "--reference cannot be combined with --kind simpo",
        ),
        (
            "--kind=orpo --precompute",
            "--precompute cannot be combined with --kind orpo",
        ),
        ("--target-margin=1", "--target-margin: expected none with kind 'sigmoid'"),
        (
            "--desirable-weight=2",
            "--desirable-weight: expected none with kind",
        ),
        ("--schedule=wsd,warmup=-1", "--schedule: warmup: .* of at least 0 .*got -1"),
        ("--kind=ipo --reference=none", "sigmoid, robust or hinge without a refer"),
        ("--max-grad-norm=0", f"--max-grad-norm: {ABOVE_0} 0"),
        ("--max-length=0", "--max-length: expected a whole number, 1 or more, got 0"),
        (
            "--max-length=17",
            "--max-length: expected a number of at most 16, got 17; the model",
        ),
        ("--row-width=0", f"--row-width: {ABOVE_0} 0"),
        ("--held-out=1", "--held-out: .* below 1, got 1.0"),
        ("--held-out=nan", "--held-out: .* below 1, got nan"),
        ("--reference=/nowhere", f"error: --reference: .* {NO_FOLDER}"),
        ("--reference={}/scorer", "expected the architecture GPT2LMHead"),
        ("--lora=0", "rank"),
        ("--lora=17", "rank.* 17"),
        ("--lora=x", "--lora: .*'x'"),
        ("--lora=2,modules=nothing", "'nothing', which matches none"),
        ("--lora=2,alpha=nan", "alpha.* nan"),
        ("--reference-storage.dtype=int4", "--reference-storage.dtype"),
        ("--placement.reference=gpu", f"{PLACE}.* got 'gpu'"),
        ("--blank=skip", CHOICE.format("skip", "--blank")),
        ("--placement.policy=data=8", "devices"),
        ("--micro-batch-size=0", "micro-batch-size to divide the 4 rows"),
    ],
}
OF_EVERY_TRAINER = [case(trainer, *of) for trainer in TRAINERS for of in EVERYWHERE]
ALONE = [case(trainer, *of) for trainer, own in OWN.items() for of in own]
CASES = [*OF_EVERY_TRAINER, *ALONE]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    with bad_inputs.loading_once():
        yield bad_inputs.make_files(tmp_path_factory.mktemp("files"))


@pytest.mark.cases(quick=8, slow=120)
@pytest.mark.parametrize(
    "bad",
    [*bad_inputs.by_one_each(OF_EVERY_TRAINER), *one_in(12, ALONE)],
    ids=bad_inputs.name,
)
def test_an_option_that_is_refused(files, tmp_path, capsys, bad):
    bad_inputs.refused(
        capsys,
        bad.trainer,
        [word.replace("{}", str(files)) for word in bad.argv],
        files=files,
        out=tmp_path / "run",
        message=bad.message,
    )
