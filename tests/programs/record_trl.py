"""Records what TRL's trainers compute as loss, gradient and advantage.

    python tests/programs/record_trl.py

Recorded with trl 1.16.0, torch 2.13.0 (CPU), Python 3.11, into
`tests/fixtures/trl_policy_gradients.npz`. It is run by hand in an environment with trl;
no test imports it, and reading the file needs neither.

Inputs, ragged on the right, of two groups of four responses:

    logprobs, old_logprobs   f32[8, 6], nats
    mask                     bool[8, 6]
    advantages, rewards      f32[8]
    lengths                  i32[9], of responses beside a limit of 20 tokens

For each CASE `CASE/loss` f32[] and `CASE/gradient` f32[8, 6], by the log-probs, from
`GRPOTrainer._compute_loss`. `advantages/CASE` f32[8] are those of a trainer that scored
its own samples with `rewards`, of which `advantages/rloo_without` has not all, and
`overlong` f32[9] are of `get_soft_overlong_punishment`.
"""

import collections
import tempfile
import types

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl
from places import FIXTURES
from trl.rewards import get_soft_overlong_punishment

GROUP, ROWS, COLUMNS = 4, 8, 6
LENGTHS = (6, 1, 3, 4, 2, 5, 6, 3)
LEFT_OUT = (
    1,
    4,
    5,
    6,
)  # rows that RLOO has no reward for: one group keeps a single one
LIMIT, BUFFER = 20, 8
PPO = {"epsilon_low": 0.2, "epsilon_high": 0.2}
CASES = {
    "grpo": {"loss_type": "grpo", **PPO},
    "grpo_two_sided": {"loss_type": "grpo", **PPO, "delta": 1.3},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.02,
        "epsilon_high": 0.05,
    },
    "dapo": {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", **PPO},
    "cispo": {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.4},
    "sapo": {"loss_type": "sapo", **PPO},
}


def inputs():
    """The inputs of every case."""
    rng = np.random.default_rng(0)
    old_logprobs = -np.abs(rng.normal(0, 1, (ROWS, COLUMNS)))
    return {
        "logprobs": (old_logprobs + rng.normal(0, 0.3, (ROWS, COLUMNS))).astype("f4"),
        "old_logprobs": old_logprobs.astype("f4"),
        "mask": np.arange(COLUMNS)[None, :] < np.array(LENGTHS)[:, None],
        "advantages": rng.normal(0, 1, ROWS).astype("f4"),
        "rewards": np.array([1, 0, 0.5, 0, 1, 1, 0.25, 1], "f4"),
        "lengths": np.array([1, 11, 12, 13, 16, 19, 20, 21, 30], "i4"),
    }


def loss(arrays, loss_type, importance_sampling_level="token", **numbers):
    """(loss, gradient by the log-probs) of `_compute_loss`, without a model."""
    tensors = {name: torch.tensor(value) for name, value in arrays.items()}
    logprobs = tensors["logprobs"].requires_grad_()
    mask = tensors["mask"].int()
    args = types.SimpleNamespace(
        delta=numbers.get("delta"),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
        use_bias_correction_kl=False,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    trainer = types.SimpleNamespace(
        args=args,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        epsilon_low=numbers.get("epsilon_low", 0.2),
        epsilon_high=numbers.get("epsilon_high", 0.2),
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        beta=0.0,
        max_completion_length=COLUMNS,
        current_gradient_accumulation_steps=1,
        off_policy_mask_threshold=numbers.get("off_policy_mask_threshold"),
        top_entropy_quantile=numbers.get("top_entropy_quantile", 1.0),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            pad_across_processes=lambda x, **_: x,
            reduce=lambda x, reduction: x,
            sync_gradients=False,
        ),
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            tensors.get("entropy", torch.zeros_like(logprobs)),
            None,
        ),
    )
    vars(args).update(numbers.get("args", {}))
    vars(trainer).update(numbers.get("trainer", {}))
    trainer.get_high_entropy_mask = types.MethodType(
        trl.GRPOTrainer.get_high_entropy_mask, trainer
    )
    nothing = torch.zeros((ROWS, 0), dtype=torch.int64)
    value = trl.GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": torch.zeros((ROWS, COLUMNS), dtype=torch.int64),
            "completion_mask": mask,
            "advantages": tensors["advantages"],
            "old_per_token_logps": tensors["old_logprobs"],
            "num_items_in_batch": mask.sum(),
        },
    )
    value.backward()
    return value.detach().numpy(), logprobs.grad.numpy()


def advantages(trainer_type, config_type, rewards, **options):
    """f32[8], of two prompts with four responses of a trainer each."""
    ids = {"<pad>": 0, "<eos>": 1, "the": 2, "a": 3, "cat": 4, "dog": 5}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"
    )
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=16,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    prompts = [{"prompt": "the cat"}, {"prompt": "a dog"}]
    of_each = rewards if isinstance(rewards[0], list) else [rewards]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_type(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[lambda completions, of=of, **_: of for of in of_each],
            train_dataset=datasets.Dataset.from_list(prompts),
            args=config_type(
                output_dir=folder,
                per_device_train_batch_size=ROWS,
                num_generations=GROUP,
                max_completion_length=4,
                report_to=[],
                use_cpu=True,
                **options,
            ),
        )
        prompts_of_rows = [prompts[row // GROUP] for row in range(ROWS)]
        output = trainer._generate_and_score_completions(prompts_of_rows)
    return output["advantages"].numpy()


def main() -> None:
    arrays = inputs()
    recorded = dict(arrays)
    for name, options in CASES.items():
        recorded[f"{name}/loss"], recorded[f"{name}/gradient"] = loss(arrays, **options)
    rewards = arrays["rewards"].tolist()
    for scale in ("group", "none"):
        recorded[f"advantages/{scale}"] = advantages(
            trl.GRPOTrainer, trl.GRPOConfig, rewards, scale_rewards=scale
        )
    some = [None if row in LEFT_OUT else reward for row, reward in enumerate(rewards)]
    for name, values in {"rloo": rewards, "rloo_without": some}.items():
        recorded[f"advantages/{name}"] = advantages(
            trl.RLOOTrainer, trl.RLOOConfig, values, beta=0.0
        )
    recorded["left_out"] = np.isin(np.arange(ROWS), LEFT_OUT)
    punish = get_soft_overlong_punishment(LIMIT, BUFFER)
    recorded["overlong"] = np.array(
        punish([[0] * int(length) for length in arrays["lengths"]]), "f4"
    )
    np.savez(FIXTURES / "trl_policy_gradients.npz", **recorded)


if __name__ == "__main__":
    main()
