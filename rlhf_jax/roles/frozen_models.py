"""The frozen models of an iteration, as its programs take them: one argument."""

from __future__ import annotations

import flax.struct

from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.reference.further import References


@flax.struct.dataclass
class FrozenModels:
    """What an iteration reads and nothing trains; a pytree.

    It is an argument of every program and never donated, and no gradient reaches it.
    Each function reads what it needs of it: sampling the base, the loss the reference
    too.
    """

    # π_ref of the KL and of a mixture that is sampled, or the teacher. It is read where
    # a program runs it: where no `ReferenceOutput` is passed, and for exact KL. None
    # takes no KL, unless there is such an output; the head alone suffices where that
    # has hidden states.
    reference: Frozen | None = None
    base: Frozen | None = None  # what adapters adapt, with `recipe.lora`
    # References beside the first by name, with their log-probs where those ran before.
    further: References = flax.struct.field(default_factory=dict)


NO_MODELS = FrozenModels()
