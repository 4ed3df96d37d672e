"""Every contact with transformers: the cache layer, the attention and mask functions, the session that installs them.

How a forward pass goes inside `with press(model)`:

1. a hook before each attention module puts our layer into the cache and leaves a `LayerCall` on the module;
2. `PressLayer.update` stores the new keys and values;
3. `attention` runs the model's own implementation while everything is still in the window, and reads all parts of the
   store otherwise;
4. a hook after the module lets the press evict, and the codec encode;
5. a hook after the decoder does the same for presses that look at all layers together (`kvpress.passes`).

Where decode steps are replayed (`capture=True`), the whole forward pass is static: 2. writes the token at the window's cursor,
and 4. follows for all layers once the pass is over.

"""

from transformers import AutoModelForCausalLM, Pipeline
from transformers.cache_utils import Cache
from transformers.pipelines import PIPELINE_REGISTRY

from kvpress.hf.attention import queries_of
from kvpress.hf.layer import PressLayer
from kvpress.hf.models import (
    check_halves_rotate,
    growing_layers,
    is_attention,
    layer_types,
    load,
    load_config,
    load_tokenizer,
    new_cache,
)
from kvpress.hf.replay import graph_recorder
from kvpress.hf.session import Session, session

__all__ = [
    "PIPELINE_REGISTRY",
    "AutoModelForCausalLM",
    "Cache",
    "Pipeline",
    "PressLayer",
    "Session",
    "check_halves_rotate",
    "graph_recorder",
    "growing_layers",
    "is_attention",
    "layer_types",
    "load",
    "load_config",
    "load_tokenizer",
    "new_cache",
    "queries_of",
    "session",
]
