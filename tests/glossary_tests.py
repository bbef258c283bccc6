"""The test that recomputes each metric of the glossary, from arrays in float64.

A new metric of rlhf_jax/runs/README.md needs a new test, or a line in the oracle of an
existing one, and its name below. test_glossary.py compares the two lists.
"""

BY_TEST = {
    "tests/algorithms/flow/test_ledger.py"
    "::test_quarters_of_lengths_and_columns_by_hand": (
        "trust/outliers",
        "trust/distance_position_1",
        "trust/distance_position_2",
        "trust/distance_position_3",
        "trust/distance_position_4",
        "trust/distance_prompt_1",
        "trust/distance_prompt_2",
        "trust/distance_prompt_3",
        "trust/distance_prompt_4",
    ),
    "tests/algorithms/flow/test_ledger.py::test_duplicates_by_hand": (
        "trust/duplicates",
        "trust/duplicates_expected",
        "trust/duplicates_z",
    ),
    "tests/algorithms/distill/test_distill.py"
    "::test_what_is_not_taught_is_in_no_loss_and_no_divisor": ("response/taught",),
    "tests/algorithms/flow/test_score.py::test_a_reference_of_another_shape": (
        "objective/kl_exact",
    ),
    "tests/algorithms/flow/test_several_references.py"
    "::test_the_reward_gets_the_weighted_sum_and_each_kl_is_logged": (
        "objective/kl_NAME",
    ),
    "tests/algorithms/grpo/test_published.py"
    "::test_what_is_cut_off_leaves_the_baseline_too": ("group/equal_fraction",),
    "tests/algorithms/nash_md/test_nash_md.py"
    "::test_advantages_are_wins_over_the_mixture_less_the_kl": ("pair/win",),
    "tests/algorithms/online_dpo/test_online_dpo.py"
    "::test_an_update_is_dpo_s_of_the_ranked_samples": (
        "pair/score_gap",
        "pair/tied_fraction",
    ),
    "tests/algorithms/policy_gradient/test_left_out.py"
    "::test_a_sum_leaves_out_what_a_reward_with_a_weight_does": ("reward/left_out",),
    "tests/algorithms/policy_gradient/test_turns.py"
    "::test_statistics_count_turns_and_what_was_observed": (
        "response/turns",
        "response/observed",
    ),
    "tests/algorithms/ppo/test_critic_apart.py"
    "::test_a_gradient_that_is_not_finite_skips_the_critic_alone": (
        "critic/skipped",
        "critic/skipped_in_a_row",
    ),
    "tests/algorithms/ppo/test_experience.py::test_objective_stats_against_loops": (
        "response/distinct_fraction",
    ),
    "tests/algorithms/ppo/test_ppo_details.py"
    "::test_a_minibatch_of_a_large_mean_ratio_is_left_out_alone": ("update/guarded",),
    "tests/algorithms/ppo/test_ppo_details.py"
    "::test_norms_of_gradients_are_those_before_clipping": (
        "policy/grad_norm",
        "critic/grad_norm",
        "update/grad_norm",
    ),
    "tests/algorithms/ppo/test_ppo_details.py"
    "::test_updates_end_with_the_approximate_kl": ("update/stopped",),
    "tests/algorithms/test_evaluation.py"
    "::test_a_judge_that_failed_for_some_counts_nothing_there": (
        "judge/score",
        "judge/failed",
    ),
    "tests/algorithms/test_evaluation.py"
    "::test_perplexity_is_a_mean_over_tokens_however_they_are_batched": (
        "eval/NAME_nll",
    ),
    "tests/algorithms/test_state.py"
    "::test_a_gradient_that_is_not_finite_changes_nothing_but_the_count": (
        "update/skipped",
    ),
    "tests/algorithms/test_state.py::test_skips_are_counted_in_a_row": (
        "update/skipped_in_a_row",
    ),
    "tests/algorithms/policy_gradient/test_left_out.py::"
    "test_worse_responses_that_the_policy_has_left_are_not_in_the_loss": (
        "policy/off_policy_masked",
    ),
    "tests/algorithms/policy_gradient/test_entropy_target.py::"
    "test_the_entropy_of_a_rollout_sets_its_bonus_and_the_next": (
        "objective/entropy_coef",
    ),
    "tests/models/experts/test_experts.py::"
    "test_the_balance_loss_is_1_where_all_is_even_and_its_formula_elsewhere": (
        "router/entropy",
        "router/load_max",
        "router/unused",
    ),
    "tests/algorithms/policy_gradient/test_chosen_tokens.py::"
    "test_the_largest_entropies_alone_are_trained": ("policy/chosen",),
    "tests/algorithms/policy_gradient/test_chosen_tokens.py::"
    "test_kl_cov_holds_the_largest_covariances": ("loss/kl_cov",),
    "tests/algorithms/test_update_formulas.py::test_an_update_is_that_of_its_formula": (
        "objective/scores",
        "objective/kl",
        "objective/kl_k3",
        "objective/kl_coef",
        "objective/ref_nll",
        "objective/non_score_reward",
        "objective/rlhf_reward",
        "objective/entropy",
        "policy/approxkl",
        "loss/divergence",
        "loss/kl",
        "penalty/clipfrac",
        "loss/entropy",
        "loss/ptx",
        "policy/clipfrac",
        "value/clipfrac",
        "policy/dual_clipfrac",
        "policy/gate",
        "policy/top_mass",
        "policy/ratio_mean",
        "policy/ratio_max",
        "policy/sampler_mismatch",
        "policy/sampler_weight",
        "policy/sampler_weight_capped",
        "policy/sampler_ess",
        "policy/sampler_kl",
        "policy/sampler_kl_k3",
        "policy/staleness",
        "policy/staleness_max",
        "trust/distance",
        "trust/weight",
        "trust/weight_z",
        "trust/entropy_ratio",
        "trust/entropy_z",
        "trust/age_max",
        "loss/policy",
        "loss/value",
        "value/explained_variance",
        "group/std",
        "response/masked",
        "response/length",
        "response/eos_fraction",
    ),
    "tests/environments/test_episodes.py::test_the_number_of_turns_ends_an_episode": (
        "reward/out_of_turns",
    ),
    "tests/environments/test_episodes.py::test_the_room_of_an_episode_ends_it": (
        "reward/out_of_room",
    ),
    "tests/environments/test_episodes.py::test_what_ends_an_episode_is_counted": (
        "reward/truncated",
        "reward/turns",
    ),
    "tests/experiments/test_certify.py::test_what_a_run_of_certificates_logs": (
        "exact/kl_to_optimum",
        "exact/gradient_error",
    ),
    "tests/functional/kl/test_penalty.py"
    "::test_k3_in_the_loss_has_its_slope_wherever_that_is_finite": (
        "penalty/overflowfrac",
        "loss/kl_overflowfrac",
    ),
    "tests/functional/kl/test_penalty.py::test_value_matches_the_oracle": (
        "loss/kl_clipfrac",
    ),
    "tests/functional/test_losses.py::test_language_model_loss_matches_the_oracle": (
        "loss/language_model",
    ),
    "tests/functional/test_losses.py::test_pairwise_loss_matches_the_oracle": (
        "loss/pairwise",
        "pairwise/accuracy",
        "pairwise/lead",
    ),
    "tests/functional/test_losses.py"
    "::test_the_gradient_is_that_of_the_formula_wherever_it_is_finite": (
        "policy/overflowfrac",
    ),
    "tests/functional/test_preference_kinds.py::test_kto_matches_the_oracle": (
        "kto/kl",
        "kto/desirable_reward",
        "kto/undesirable_reward",
        "kto/desirable_logprob",
        "kto/undesirable_logprob",
    ),
    "tests/functional/test_preference_kinds.py::test_simpo_and_orpo_match_the_oracle": (
        "dpo/nll",
    ),
    "tests/functional/test_preference_losses.py"
    "::test_losses_and_gradients_match_the_oracle": ("loss/dpo",),
    "tests/functional/test_preference_losses.py"
    "::test_statistics_are_implicit_rewards": (
        "dpo/chosen_reward",
        "dpo/rejected_reward",
        "dpo/margin",
        "dpo/accuracy",
        "dpo/chosen_logprob",
        "dpo/rejected_logprob",
    ),
    "tests/roles/rewards/test_rewards.py::test_a_weighted_sum_names_its_parts": (
        "reward/NAME",
    ),
    "tests/roles/rewards/test_rewards.py::test_an_ensemble_is_its_formula": (
        "reward/member_NAME",
        "reward/disagreement",
    ),
    "tests/runs/test_glossary.py"
    "::test_a_row_names_the_alarms_that_are_active_at_its_step": ("alarms",),
    "tests/runs/test_glossary.py::test_a_verifier_that_took_too_long_has_failed_too": (
        "reward/failed",
        "reward/timed_out",
    ),
    "tests/verification/test_pool.py::test_what_a_verifier_counts_is_a_share_of_all": (
        "reward/refused",
        "reward/code_timed_out",
        "reward/suspicious",
    ),
    "tests/runs/test_glossary.py::test_drift_is_logged_by_tensor_and_as_one_vector": (
        "drift/relative",
        "drift/global_norm",
    ),
    "tests/runs/test_glossary.py"
    "::test_how_episodes_ended_is_a_share_of_all_that_were_to_be": ("reward/late",),
    "tests/train/test_watched_numbers.py"
    "::test_held_out_prompts_are_evaluated_one_by_one": (
        "eval/greedy_score",
        "eval/score",
        "eval/reward/NAME",
        "eval/greedy_reward/NAME",
        "eval/length",
        "eval/pass_at_k",
        "eval/pass_at_k_reward/NAME",
        "eval/kl",
    ),
    "tests/train/test_watched_numbers.py"
    "::test_redraws_are_counted_and_every_group_that_was_drawn": (
        "group/redraws",
        "group/drawn_equal_fraction",
    ),
    "tests/train/test_watched_numbers.py"
    "::test_the_check_after_a_hand_over_is_the_largest_mean_distance_of_a_response": (
        "policy/sampler_check",
    ),
}

# {metric: "tests/path.py::test_name"}
RECOMPUTED = {metric: test for test, metrics in BY_TEST.items() for metric in metrics}
