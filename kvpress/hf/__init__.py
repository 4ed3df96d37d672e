# SPDX-License-Identifier: Apache-2.0
"""Every contact with transformers: the cache layer, the attention and mask functions, sessions and what installs them.

How a forward pass goes inside `with press(model)`, all of whose state stands on a `Forward` of the thread that runs it:

1. a hook before each attention module puts our layer into the cache and leaves a `LayerCall` on the pass;
2. `PressLayer.update` stores the new keys and values;
3. `attention` runs the model's own implementation while everything is still in the window, and reads all parts of the
   store otherwise;
4. a hook after the module lets the executor evict (`kvpress.core.executor`), and the codec encode;
5. once the decoder has returned, the session does the same for what looks at all layers together (`kvpress.observe.passes`).

Where decode steps are replayed (`capture=True`), the whole forward pass is static: 2. writes the token at the window's cursor,
and 4. follows for all layers once the pass is over.
"""
