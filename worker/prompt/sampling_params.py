"""How the next token is chosen: what a request asked for, after validation. Pure values, no torch."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One choice's sampling settings. Defaults are OpenAI's, except that absent means "off".

    temperature below 1e-5 is greedy. `logit_bias` maps token id to a bias in [-100, 100]. `logprobs` is how many top
    alternatives are reported per token; None reports nothing, 0 reports the chosen token alone; `prompt_logprobs`
    says the same of the prompt's tokens. `pools`: the prompt's embedding is wanted.
    The randomness of output token i is a function of (seed, choice, i) and nothing else.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pools: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
