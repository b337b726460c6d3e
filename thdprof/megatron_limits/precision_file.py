"""The file of `--te-precision-config-file`, by which Megatron-LM quantizes modules by their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from thdprof.errors import DataError
from thdprof.files import read_yaml
from thdprof.megatron_limits.quantization import TAKEN_ALL_THE_SAME

FLAG = "--te-precision-config-file"
"""The argument that names the file; it sets the field `quant_recipe` of TransformerConfig."""
CASES = {
    "`quant_recipe` with quantizers of one's own or Kitchen's": "choose among Transformer Engine's own recipes",
    "`quant_recipe` with recipes that Hopper GPUs do not have": TAKEN_ALL_THE_SAME,
    "`quant_recipe` with overlapped expert communication": "leave --overlap-moe-expert-parallel-comm out",
}
"""Limits that the file's contents meet, by their names, and what to change."""


def quant_recipe_of(path: str) -> Any:
    """What megatron-core makes of the file, as far as the table of limits looks at it.

    Args:
        path: the argument's value.

    Returns:
        An object with the file's `configs`; the path where the file is not there or does not hold any, with which
        Megatron ends by itself.
    """
    try:
        values = read_yaml(path, where=path)
    except DataError:
        return path
    configs = values.get("configs") if isinstance(values, dict) else None
    if not isinstance(configs, dict):
        return path
    return SimpleNamespace(configs={name: one for name, one in configs.items() if isinstance(one, dict)})
