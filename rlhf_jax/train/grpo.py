"""GRPO on grade-school mathematics: your own checkpoint, and answers that are checked.

    python rlhf-jax sft --model gpt2 --data gsm8k/train.jsonl \\
        --prompt-field question --response-field answer --out runs/sft
    rlhf-jax grpo --model runs/sft/model --data gsm8k/train.jsonl \\
        --held-out gsm8k/test.jsonl --out runs/gsm8k

--data and --held-out hold {"question": ..., "answer": "... #### 72"} a line, as GSM8K
(github.com/openai/grade-school-math) has them. Each question of a batch is answered
--group-size times; an answer scores 1 where the number after its last #### is the
row's, else 0, and what got more than its group becomes likelier, at kl_coef times the
KL to the frozen reference, which is --model as it starts. There is no reward model and
no critic. Processes verify one batch while the device prices it by the reference.

--reference none leaves the reference out: never held, never run. --unmarked last_number
reads the last number of an answer without ####, and --template "Question: {question}
Answer:" is for models that were not trained on bare questions; --chat asks as the user
of the tokenizer's chat template does. --preset deepseekmath, rloo or reinforce++ starts
from a published recipe. Held-out accuracy, of the likeliest answer, is taken before and
after. OUT/model is a Hugging Face checkpoint.

One device that holds the parameters in float32 four times, and once more with a
reference (GPT-2 small: 2.4 GiB), and the activations of --micro-batch-size answers.
Checked at toy size on the real files only: on a checkpoint that can solve some of the
questions neither time nor accuracy was measured. One that solves none of them learns
nothing, as all answers of a group score 0: group/equal_fraction is 1 then.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
import optax
import tyro
from jax.sharding import Mesh

from rlhf_jax.algorithms import grpo, self_check, state
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import rollout, score
from rlhf_jax.algorithms.grpo import GroupRecipe
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches, digests, encoding, files, json_lines, tokenization
from rlhf_jax.data.encoding import Tokens, Written
from rlhf_jax.data.json_lines import Row
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.devices.sharding import MeshOption
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.control import fixed
from rlhf_jax.models.config import Attention, Remat
from rlhf_jax.models.generation import decode
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards import verifiers
from rlhf_jax.roles.rewards.model import Scores
from rlhf_jax.runs import command_line, folder, metrics, plots, run, run_config
from rlhf_jax.verification.pool import PooledReward, VerifierPool

Array = jax.Array
Params = Any
RECIPE = GroupRecipe(temperature=1.0)
KL_COEF = 0.01  # with a reference, unless another is asked for
SAMPLE_EVERY, SHOWN = 10, 4  # iterations, and answers in samples.jsonl each time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    """The options of `rlhf-jax grpo`."""

    model: str
    """Policy to start from, a checkpoint folder or hub id."""
    data: str
    """Questions to train on: JSONL, or hf:NAME:SPLIT."""
    held_out: str
    """Questions to measure the accuracy on."""
    tokenizer: str | None = None
    """Folder or hub id; None takes the one in --model."""
    question_field: str = "question"
    """Name of the questions."""
    answer_field: str = "answer"
    """Name of the worked answers, which end in #### and a number."""
    template: str = "{question}"
    """What a question is put to the model as."""
    chat: bool = False
    """Put it as a message of the user, by the tokenizer's chat template."""
    unmarked: Literal["wrong", "last_number"] = "wrong"
    """What becomes of an answer without ####."""
    overlong: Literal["error", "drop"] = "drop"
    """What becomes of questions that leave no room for the answer."""
    reference: Literal["start", "none"] = "start"
    """What the KL is taken to: --model as it starts, or nothing."""
    kl_coef: float | None = None
    """Reward units per nat of KL; None is 0.01 with a reference."""
    grpo: Annotated[GroupRecipe, tyro.conf.arg(name="")] = RECIPE
    """The coefficients and choices of GRPO, options without a prefix."""
    num_steps: int = 500
    """Iterations: a batch of answers and the updates on it."""
    batch_size: int = 128
    """Answers an iteration."""
    max_new_tokens: int = 256
    """Longest answer, tokens."""
    learning_rate: float = 1e-6
    """Falls to 0 linearly."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations; trained parameters stay float32."""
    num_workers: int | None = None
    """Processes that verify; None is one a processor."""
    timeout: float = 10.0
    """Seconds to verify an answer."""
    stop_timeout: float = 20.0
    """Seconds that answers and verifiers may still take after SIGTERM or Ctrl-C. Then
    the state from before this step is saved, and the run ends."""
    on_failure: Literal["zero", "stop"] = "zero"
    """What becomes of an answer that could not be verified, or of the run."""
    eval_rows: int = 256
    """Held-out questions to answer, from the beginning; GSM8K has 1319."""
    remat: Remat = "none"
    """What of a layer a gradient computes again, to save memory."""
    attention: Attention = "xla"
    """Of whole sequences; cudnn is flash attention, on a GPU in bfloat16."""
    mesh: MeshOption = sharding.ONE_DEVICE
    """How several devices share rows and parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.rows(batch_size=self.batch_size)
        checks.positive(
            num_steps=self.num_steps,
            max_new_tokens=self.max_new_tokens,
            learning_rate=self.learning_rate,
            eval_rows=self.eval_rows,
            stop_timeout=self.stop_timeout,
        )
        checks.non_negative(kl_coef=self.beta)
        checks.groups(self.batch_size, group_size=self.grpo.group_size)
        if self.reference == "none" and self.beta:
            raise InputError(
                f"--reference none: expected no --kl-coef, as there is nothing to take "
                f"a KL to, got {self.beta:g}; leave one of them out"
            )
        if "{question}" not in self.template:
            raise InputError(
                f"--template: expected {{question}} where the question is to stand, "
                f"got {self.template!r}; put it in"
            )

    @property
    def beta(self) -> float:
        """The KL coefficient."""
        if self.kl_coef is not None:
            return self.kl_coef
        return KL_COEF if self.reference == "start" else 0.0


PRESETS: dict[str, dict[str, Any]] = {
    "deepseekmath": {
        "grpo": grpo.PUBLISHED,
        "kl_coef": 0.04,
        "batch_size": 1024,
        "max_new_tokens": 1024,
        "learning_rate": 1e-6,
    },
    "rloo": {"grpo": dataclasses.replace(grpo.RLOO, temperature=1.0)},
    "reinforce++": {
        "grpo": dataclasses.replace(grpo.REINFORCE_PLUS_PLUS, temperature=1.0)
    },
}
"""--preset NAME: what was published, where it differs from the defaults."""


def put(question: Written, *, options: Config) -> Written:
    """What the model is asked; of a conversation the last message is the question."""
    if not isinstance(question, str):
        *before, last = question
        text = options.template.replace("{question}", last["content"])
        return [*before, last | {"content": text}]
    text = options.template.replace("{question}", question)
    return [{"role": "user", "content": text}] if options.chat else text


def read_questions(
    source: str, *, verifier: verifiers.Gsm8k, start: Pretrained, options: Config
) -> tuple[list[Row], list[Tokens]]:
    """Rows whose questions leave room for an answer, and what the model is asked.

    Raises:
      InputError: an answer has no number, or a row no question; names file and line.
    """
    verifiers.check_answers(json_lines.read_located(source), verifier=verifier)
    field = options.question_field
    rows = [
        row | {"asked": put(row[field], options=options)}
        for row in files.read_prompts(source, field=field)
    ]
    return encoding.encode_prompts(
        start.tokenizer,
        rows,
        max_length=start.room(max_new_tokens=options.max_new_tokens),
        field="asked",
        overlong=options.overlong,
    )


def make_algorithm(options: Config, *, start: Pretrained) -> grpo.GRPO:
    """What is fixed during the run."""
    recipe = options.grpo
    updates = options.num_steps * recipe.num_epochs * recipe.num_minibatches
    return grpo.GRPO(
        **vars(recipe),
        model=start.model,
        policy_optimizer=optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adam(optax.linear_schedule(options.learning_rate, 0.0, updates)),
        ),
        max_new_tokens=options.max_new_tokens,
        stop_ids=start.stop_ids,
    )


class Programs:
    """What is compiled, each with its parameters as arguments."""

    def __init__(self, algorithm: grpo.GRPO, *, mesh: Mesh) -> None:
        shape = {
            "model": algorithm.model,
            "max_new_tokens": algorithm.max_new_tokens,
            "temperature": algorithm.temperature,
        }
        self._mesh = mesh
        jit, bind, on = jax.jit, functools.partial, functools.partial(sharding.on, mesh)
        learn = bind(on(grpo.learn), recipe=algorithm)
        self.sample = jit(bind(on(grpo.sample), recipe=algorithm))
        self.price = jit(bind(on(score.reference_logprobs), **shape))
        self.learn = jit(learn, donate_argnames=("state",))
        self.measure = jit(bind(on(self_check.measure), reference=None, **shape))
        greedy = decode.Shaping(greedy=True)
        stop_ids = algorithm.stop_ids
        self.answer = jit(
            bind(on(rollout.rollout), **shape, stop_ids=stop_ids, shaping=greedy)
        )
        self._seen_by_reward = bind(grpo.seen_by_reward, recipe=algorithm)

    def score(
        self, answered: Rollout, *, reference: Frozen | None, reward: PooledReward
    ) -> tuple[Scores, Array | None]:
        """Scores, and the reference's log-probs, taken while processes verify."""
        mine = row_sharding.local_rows(self._seen_by_reward(answered))
        pending = reward.submit(mine)
        priced = None
        if reference is not None:
            priced = self.price(reference, rollout=answered)
        scores = row_sharding.put_computed(pending.collect(), mesh=self._mesh)
        return scores, priced


def accuracy(
    params: Params,
    held_out: tuple[list[Row], list[Tokens]],
    *,
    programs: Programs,
    pool: VerifierPool,
    start: Pretrained,
    options: Config,
) -> float:
    """Share of the held-out questions whose likeliest answer is right."""
    rows, tokens = held_out
    count = min(len(rows), options.eval_rows)
    size = min(options.batch_size, count)
    reward = pool.reward(decode=start.decode, rows=rows)
    asked = batches.prompt_batches(
        tokens[:count], batch_size=size, seed=0, pad_id=start.pad_id
    )
    key = jax.random.key(0)  # the likeliest answer needs none
    pending = [
        reward.submit(
            processes.whole(programs.answer(params, prompts=asked[i], key=key))
        )
        for i in range(-(-count // size))
    ]
    # The last batch goes on with questions that the first ones held.
    right = np.concatenate([scores.collect().total for scores in pending])[:count]
    return float(right.mean())


def rehearse(
    train: TrainState,
    reference: Frozen | None,
    programs: Programs,
    *,
    prompts: Prompts,
    reward: PooledReward,
    key: Array,
    options: Config,
) -> None:
    """The first iteration up to its update, before there is a run folder."""
    answered = programs.sample(train.policy, prompts=prompts, key=key)
    scores, priced = programs.score(answered, reference=reference, reward=reward)
    batch = {"rollout": answered, "scores": scores.total, "ref_logprobs": priced}
    jax.eval_shape(programs.learn, train, **batch, reference=reference, key=key)
    measured = programs.measure(train.policy, rollout=answered, ref_logprobs=priced)
    self_check.require(
        processes.whole(measured),
        tolerance=self_check.TOLERANCE[options.dtype],
        expect_equal=True,
    )


def improve(
    stage: run.Stage,
    programs: Programs,
    *,
    prompts: batches.Batches[Prompts],
    reward: PooledReward,
    options: Config,
) -> Params:
    """GRPO: right answers, less kl_coef · KL to the reference; returns the policy."""
    train, reference = stage.state["train"], stage.state["reference"]
    for step in stage.steps():
        key = jax.random.fold_in(stage.state["root_key"], step)
        answered = programs.sample(train.policy, prompts=prompts[step], key=key)
        with stage.user_code():
            scores, priced = programs.score(
                answered, reference=reference, reward=reward
            )
        train, stats, _ = programs.learn(
            train,
            rollout=answered,
            scores=scores,
            # Run again there only for exact KL, which needs its hidden states.
            reference=reference if options.grpo.penalty.needs_logits else None,
            ref_logprobs=priced,
            key=key,
        )
        stage.state["train"] = train
        samples = []
        if step % SAMPLE_EVERY == 0:
            mine, totals = row_sharding.local_rows((answered, scores.total))
            shown = jax.tree.map(lambda leaf: leaf[:SHOWN], mine)
            samples = [
                {"question": question, "answer": answer, "score": float(found)}
                for (question, answer), found in zip(
                    tokenization.texts(shown, decode=reward.decode),
                    totals[:SHOWN],
                    strict=True,
                )
            ]
        stage.end_step(step, stats, samples)
    return train.policy


def main(options: Config) -> None:
    """Runs `rlhf-jax grpo` with its options."""
    started = time.perf_counter()
    mesh = options.mesh.make()
    verifier = verifiers.Gsm8k(options.answer_field, options.unmarked)
    start = pretrained.load(
        options.model,
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        remat=options.remat,
        attention=options.attention,
        sharding=functools.partial(sharding.shardings, mesh=mesh),
    )
    algorithm = make_algorithm(options, start=start)
    (rows, tokens), held_out = (
        read_questions(source, verifier=verifier, start=start, options=options)
        for source in (options.data, options.held_out)
    )
    processes.agree("the questions", json.dumps([rows, tokens, held_out]))
    prompts = batches.prompt_batches(
        tokens,
        batch_size=options.batch_size,
        samples_per_prompt=algorithm.group_size,
        seed=options.seed,
        pad_id=start.pad_id,
        share=row_sharding.row_share(mesh),
    ).map(lambda batch: row_sharding.put_rows(batch, mesh=mesh))
    reference = None if options.reference == "none" else frozen.freeze(start.params)
    train = state.grpo_state(
        policy=start.params,
        policy_optimizer=algorithm.policy_optimizer,
        kl=fixed(options.beta),
    )
    start = start._replace(params=None)  # the first update takes them
    # All of it, or `jit` would compile everything again after a step.
    train = sharding.place(train, mesh=mesh)
    key = sharding.place(jax.random.key(options.seed), mesh=mesh)
    programs = Programs(algorithm, mesh=mesh)
    with VerifierPool(
        verifier,
        num_workers=options.num_workers,
        timeout=options.timeout,
        on_failure=options.on_failure,
    ) as pool:
        reward = pool.reward(decode=start.decode, rows=rows)
        measure = functools.partial(
            accuracy,
            held_out=held_out,
            programs=programs,
            pool=pool,
            start=start,
            options=options,
        )
        rehearse(
            train,
            reference,
            programs,
            prompts=prompts[0],
            reward=reward,
            key=jax.random.fold_in(key, 0),
            options=options,
        )
        before = measure(train.policy)
        meta = {
            "data_digest": digests.of_tokens(tokens),
            "rows_digest": digests.of_rows(rows),  # with the answers
        }
        held = {"train": train, "reference": reference, "root_key": key}
        with (
            run.Run(
                options,
                num_steps={"grpo": options.num_steps},
                stop_timeout=options.stop_timeout,
            ) as job,
            job.stage("grpo", held, meta=meta) as stage,
        ):
            trained = improve(
                stage, programs, prompts=prompts, reward=reward, options=options
            )
        after = measure(trained)
    if reference is not None:
        frozen.verify(reference)
    pretrained.save(
        job.folder, trained, start=start, base=None, lora=None, name=options.model
    )
    first, *_, last = metrics.read(job.folder / "metrics.jsonl") * 2
    summary: dict[str, Any] = {
        "accuracy_before": before,
        "accuracy_after": after,
        "score_first": first["objective/scores"],
        "score_last": last["objective/scores"],
        "kl_last": last.get("objective/kl"),
        "seconds": time.perf_counter() - started,
    }
    plots.draw(job.folder)
    folder.write_summary(job.folder, summary)
    print(f"accuracy {before:.3f} before, {after:.3f} after; {job.folder / 'model'}")


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax grpo`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        presets=PRESETS,
        prog="rlhf-jax grpo",
        argv=argv,
    )
