"""What no class says about itself: an example of every press, what it needs, what it refuses, and what no suite can test of it.

Everything else about a press, such as when it acts, is read off its class; `docs/generate.py` writes both down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpress.presses.base import BasePress

EVERY_SUITE = "every suite"


@dataclass(frozen=True)
class Refusal:
    """A spec that is refused, when it is parsed, when it meets a model or in a later turn, and why."""

    spec: str
    why: str


@dataclass(frozen=True)
class Exemption:
    """A suite of all evicting presses that one does not take part in, and what tests it instead.

    Of `EVERY_SUITE` the whole press is left out. `settings` are those that alone are exempt.
    """

    suite: str
    why: str
    settings: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known of a press besides its class.

    `example` is a spec that parses everywhere, `needs` what has to be made for a model before the press suits it.
    """

    example: str
    needs: str = ""
    refuses: tuple[Refusal, ...] = ()
    exempt: tuple[Exemption, ...] = ()


_TABLE = "a table of heads that was learned for the model (`table`)"
_EVEN = "it keeps equally many pairs in every head, and the inner press does not"
_OTHER_MODEL = "without a file of its own, a model other than the bundled reference model"
_SEALED = "keys that a codec or selector has sealed cannot be turned again; refused in the second turn"
_TWO_CHOICES = "both would choose the pairs to keep"
_NO_COMMON_BUDGET = (
    "heads of a layer have no common budget; its own tests run the oracle at every decode step, batches and later turns"
)

FACTS: Mapping[str, Facts] = {
    "none": Facts("none"),
    "random": Facts("random:0.5,seed=3"),
    "knorm": Facts("knorm:0.5"),
    "streaming_llm": Facts(
        "streaming_llm:0.5",
        refuses=(Refusal("streaming_llm:0.5,reindex=true + kivi:bits=4,residual_length=32", _SEALED),),
        exempt=(
            Exemption(
                "mask oracle",
                "keys move, so hiding the evicted ones is another computation; compared with a cache numbered from zero",
                "`reindex=True`",
            ),
        ),
    ),
    "snapkv": Facts("snapkv:0.5"),
    "tova": Facts("tova:0.5"),
    "observed_attention": Facts("observed_attention:0.5"),
    "h2o": Facts(
        "h2o:0.5,interval=32",
        exempt=(
            Exemption(
                "mask oracle",
                "evicts at every token, while the oracle hides what one eviction removed; replayed query by query",
                "`interval=1`",
            ),
        ),
    ),
    "expected_attention": Facts("expected_attention:0.5"),
    "expected_attention_stats": Facts(
        "expected_attention_stats:0.5",
        needs="statistics of the model's queries: `kvpress calibrate --method expected_attention` (`stats_folder`)",
        refuses=(Refusal("expected_attention_stats:0.5", _OTHER_MODEL),),
        exempt=(
            Exemption(
                EVERY_SUITE,
                "needs a file per model; its own tests run the oracle, padding, chunks and decoding with calibrated ones",
            ),
        ),
    ),
    "keydiff": Facts("keydiff:0.5"),
    "leverage_score": Facts("leverage_score:0.5"),
    "non_causal_attn": Facts("non_causal_attn:0.5"),
    "compactor": Facts("compactor:0.5"),
    "kvzip": Facts(
        "kvzip:0.5",
        refuses=(
            Refusal("kvzip:0.5", "there is no tokenizer beside the model and `repeat_prompt` is text"),
            Refusal("decoding(kvzip:0.5)", "it scores by reading a prompt again, which generated tokens are not"),
        ),
        exempt=(
            Exemption(
                "pairs per layer after a turn",
                "layers share one budget; what is kept is tested against eager attention",
                "`layerwise=False`",
            ),
        ),
    ),
    "criticalkv": Facts("criticalkv(snapkv:0.5)", refuses=(Refusal("criticalkv(adakv(snapkv:0.5))", _TWO_CHOICES),)),
    "critical_adakv": Facts(
        "critical_adakv(snapkv:0.5)", refuses=(Refusal("critical_adakv(criticalkv(snapkv:0.5))", _TWO_CHOICES),)
    ),
    "chunkkv": Facts("chunkkv(snapkv:0.5)", refuses=(Refusal("chunkkv(adakv(snapkv:0.5))", _TWO_CHOICES),)),
    "block": Facts("block(keydiff:0.5)", refuses=(Refusal("block(adakv(snapkv:0.5))", _EVEN),)),
    "key_rerotation": Facts(
        "key_rerotation(knorm:0.5)",
        refuses=(
            Refusal("key_rerotation(knorm:0.5) + kivi:bits=4,residual_length=32", _SEALED),
            Refusal("key_rerotation(knorm:0.5) + quest:budget=16", _SEALED),
        ),
        exempt=(
            Exemption(
                EVERY_SUITE,
                "keys move, so hiding the evicted ones is another computation; compared with a cache numbered from zero",
            ),
        ),
    ),
    "adakv": Facts("adakv(snapkv:0.5)", refuses=(Refusal("adakv(criticalkv(snapkv:0.5))", _TWO_CHOICES),)),
    "chunk": Facts("chunk(snapkv:0.5)", refuses=(Refusal("chunk(adakv(snapkv:0.5))", _EVEN),)),
    "pyramidkv": Facts("pyramidkv:0.5"),
    "per_layer_compression": Facts(
        "per_layer_compression(knorm):compression_ratios=(0.7,0.5,0.3,0.3)",
        refuses=(
            Refusal("per_layer_compression(knorm):compression_ratios=(0.5,)", "the model has another number of layers"),
        ),
        exempt=(
            Exemption(
                EVERY_SUITE, "its list has one ratio per layer of a model; its own tests run the oracle and the state"
            ),
        ),
    ),
    "duo_attention": Facts(
        "duo_attention:0.5,on_the_fly_scoring=true",
        needs=f"{_TABLE}, or `on_the_fly_scoring=True`",
        refuses=(Refusal("duo_attention:0.5", "nothing says which heads stream"),),
        exempt=(Exemption(EVERY_SUITE, _NO_COMMON_BUDGET),),
    ),
    "rlkv": Facts(
        "rlkv",
        needs=_TABLE,
        refuses=(Refusal("rlkv:0.5", "nothing says which heads stream"),),
        exempt=(Exemption(EVERY_SUITE, _NO_COMMON_BUDGET),),
    ),
    "composed": Facts(
        "snapkv:0.5 + kivi:bits=4 + quest:budget=128",
        refuses=(
            Refusal("kivi + gear", "the same pairs have one codec"),
            Refusal("quest + tidal_decode", "the same pairs have one selector"),
            Refusal("h2o:0.5 + decoding(knorm)", "one press evicts while tokens are generated"),
        ),
    ),
    "decoding": Facts(
        "decoding(snapkv):compression_interval=128,target_size=1024",
        refuses=(
            Refusal("decoding(kivi)", "a codec has no scores; it acts on generated tokens anyway"),
            Refusal(
                "decoding(duo_attention:0.5,on_the_fly_scoring=true)", "it evicts while tokens are generated anyway"
            ),
        ),
    ),
    "prefill_decoding": Facts(
        "prefill_decoding(snapkv:0.5; decoding(knorm):target_size=1024)",
        refuses=(
            Refusal("prefill_decoding(decoding_press=snapkv:0.5)", "the second press must act on generated tokens"),
            Refusal("prefill_decoding(kivi:bits=4)", "codecs and selectors have no phase; they are composed with `+`"),
        ),
    ),
    "kivi": Facts("kivi:bits=2"),
    "adaquant": Facts("adaquant"),
    "zipcache": Facts("zipcache"),
    "gear": Facts("gear:bits=2"),
    "gear_l": Facts("gear_l:bits=2"),
    "cq": Facts(
        "cq:bits=8,coupled=8",
        needs="books of the model: `kvpress calibrate --method cq` (`calibration`)",
        refuses=(
            Refusal("cq:bits=8,coupled=8", _OTHER_MODEL),
            Refusal("cq:bits=8,coupled=2", "no books were made for these settings"),
        ),
    ),
    "quest": Facts("quest:budget=1024"),
    "double_sparsity": Facts(
        "double_sparsity:budget=1024",
        needs="channels of the model: `kvpress calibrate --method double_sparsity` (`calibration`)",
        refuses=(Refusal("double_sparsity:budget=1024", _OTHER_MODEL),),
    ),
    "tidal_decode": Facts("tidal_decode:budget=1024"),
}
"""By the name of the press."""

ALL_REFUSE = (
    "caches of a fixed size (`StaticCache`): storage has to shrink",
    "assisted decoding, which takes back tokens that a press has already consumed",
    "attention masks of 4 dimensions; padding is a 2-dimensional mask of real tokens",
    "models that do not call the attention interface of transformers, or pass it arguments that change the attention in a way "
    "compressed attention does not know",
)
"""What no press works with."""


def phases(press: BasePress) -> tuple[str, ...]:
    """Return which tokens a press acts on by itself: those of the prompt, generated ones, both or none."""
    from kvpress.presses.base import BasePress

    prompt = press.encodes or type(press).after_prefill is not BasePress.after_prefill or "prefill" in press.follows
    generated = press.encodes or press.selects or press.acts_in_decoding or "decode" in press.follows
    return tuple(name for name, acts in (("prompt", prompt), ("generated tokens", generated)) if acts)


def allows_decoding(press: BasePress) -> bool:
    """Whether a press can be put into `decoding(...)`."""
    from kvpress.presses.decoding import DecodingPress

    try:
        DecodingPress(press)  # type: ignore[arg-type]  # refusing others is what is asked for
    except TypeError:
        return False
    return True
