"""How many KV blocks a worker gets: `--kv-memory` against what is free beside the weights. Pure arithmetic."""

from __future__ import annotations

import re

from worker.engine.engine_config import EngineSetupError

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "t": 10**12, "tb": 10**12}
_AMOUNT_MAX = 2**63
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_kv_memory(text: str) -> int | float:
    """An int is bytes ("2GiB", "500MB", "1073741824"), a float a share of what is free, in (0, 1] ("0.9").

    Raises EngineSetupError naming the setting.
    """
    match = _QUANTITY.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS:
        raise EngineSetupError(f"kv_memory {text!r} is neither an amount like 2GiB nor a share like 0.9.")
    number = float(match[1])
    if not unit and ("." in match[1] or number == 1):
        if 0 < number <= 1:
            return number
        raise EngineSetupError(f"kv_memory {text!r}: a share of free memory lies above 0 and up to 1, like 0.9.")
    if number > _AMOUNT_MAX:
        raise EngineSetupError("kv_memory is more than any machine has: give an amount like 2GiB.")
    if not number:
        raise EngineSetupError("kv_memory is 0: give the cache some room, for example 1GiB.")
    return int(number * _UNITS[unit])


def num_kv_blocks(kv_memory: str, *, block_bytes: int, free_bytes: int) -> int:
    """Blocks that fit: at least one. Raises EngineSetupError when none does or more is asked for than is free."""
    wanted = parse_kv_memory(kv_memory)
    budget = int(wanted * free_bytes) if isinstance(wanted, float) else wanted
    if budget > free_bytes:
        raise EngineSetupError(f"kv_memory {kv_memory} is more than the {_mib(free_bytes)} that are free beside "
                               "the weights: lower it, or choose a smaller model.")
    if budget < block_bytes:
        raise EngineSetupError(f"kv_memory {kv_memory} leaves {_mib(budget)}, and one block of KV needs "
                               f"{_mib(block_bytes)}: raise it, or choose a smaller block_size or model.")
    return budget // block_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
