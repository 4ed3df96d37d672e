# SPDX-License-Identifier: Apache-2.0
"""Interface to transformers: cache layers, attention and mask functions, sessions and their hooks.

A forward pass inside `with press(model)` has these steps. Its state is in a `Forward` of the running thread.

1. A hook before each attention module puts a `PressLayer` into the cache and sets up a `LayerCall`.
2. `PressLayer.update` stores the new keys and values.
3. `attention` runs the model's own implementation while all pairs are in the window; otherwise it reads the whole store.
4. A hook after the module evicts (`kvpress.core.executor`) and encodes.
5. After the decoder, the session runs the steps that act on all layers together (`kvpress.observe.passes`).

With `capture=True`, the whole forward pass of a decode step is static: step 2 writes the token at the window's cursor, and step
4 runs for all layers after the pass.
"""
