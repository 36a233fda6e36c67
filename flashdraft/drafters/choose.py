"""From what the user names to a drafter."""

from __future__ import annotations

import warnings
from pathlib import Path

from flashdraft.core import UserError
from flashdraft.device import Placement
from flashdraft.drafters.base import Drafter, NoDrafter
from flashdraft.drafters.dflash.drafter import DFlashDrafter
from flashdraft.drafters.dflash.model import DFlashModel
from flashdraft.drafters.lookup import LookupDrafter
from flashdraft.fast import speed_up
from flashdraft.target.base import Target

AUTO, LOOKUP, NONE = "auto", "lookup", "none"


def choose_drafter(
    name: str,
    target: Target,
    placement: Placement,
    *,
    shipped: Path | None = None,
    block_size: int | None = None,
    fast: bool = True,
    notes: Path | None = None,
) -> Drafter:
    """`auto` (the drafter that ships for this target), `lookup`, `none`, a folder or a hub id.

    Warns when `auto` finds none and prompt lookup takes its place. Raises UserError when drafter and target do not fit.
    """
    if name == AUTO and shipped is None:
        warnings.warn(
            f"no drafter ships for {target.name}: drafting by prompt lookup, which helps little on new text; "
            "give a drafter folder or hub id",
            stacklevel=2,
        )
    if name == NONE:
        if block_size is not None:
            raise UserError("block_size has no effect without a drafter; leave one of the two out")
        return NoDrafter()
    if name == LOOKUP or (name == AUTO and shipped is None):
        return LookupDrafter() if block_size is None else LookupDrafter(block_size)
    source = shipped if name == AUTO and shipped is not None else name
    model = DFlashModel.from_pretrained(source, device=placement.device, dtype=placement.dtype)
    if fast:
        speed_up(model, notes)
    drafter = DFlashDrafter(model, block_size)
    drafter.check(target)
    return drafter
