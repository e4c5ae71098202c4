"""Read the mask token of a model that was trained to draft several tokens in one pass.

The model reads the text, then copies of the mask token. Its prediction at the text's last token is
the next token, as in any model; at the mask token number i it is the token i places later. PARD
names the mask token `pard_token`, P-EAGLE `ptd_token_id`, DFlash `dflash_config.mask_token_id`.

The number of drafts that a pass was trained for is `para_num` in PARD's training settings, and the
size of DFlash's blocks: their first token and the masks after it. PARD's published config.json
files do not state it; PARD-2's models are trained for 16, twice as many as PARD's.

PARD's models are ordinary models. P-EAGLE's and most of DFlash's also read the target's hidden
states, which do not leave the target here; they are refused. A PARD-2 model works with or without
these states: it is exported without them.
"""

from __future__ import annotations

import logging
import re

from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import Fields, format_value

log = logging.getLogger("pilotfish.export")

_PLAIN_KEYS = ("pard_token", "ptd_token_id")
_DFLASH = "dflash_config"
_SHIFT_KEY = "sample_from_anchor"  # whether a mask predicts the next place; DFlash: by default not
_COUNT_KEYS = ("para_num", "block_size")
_PARD2_DRAFTS = 16
# Keys with a value other than null, 0, false or [] in models that read the target's hidden states.
_STATE_KEYS = (
    "draft_vocab_size", "target_hidden_size", "target_layer_ids", "num_target_layers",
    "eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_layers", "speculators_model_type",
)  # fmt: skip
# Classes of such models.
_HEADS = re.compile("Eagle|Medusa|MTP|Speculator")
# Keys of PARD and PARD-2 that have no effect on a model without the target's hidden states.
_INERT_KEYS = (
    "spd_type", "pard2", "pard2_scale", "pard2_proj_bias", "pard2_target_dim",
    "pard2_target_layers",
)  # fmt: skip


def refuse_heads(fields: Fields) -> None:
    """Raise `ExportError` for a drafter that reads the target's hidden states, by its keys or name.

    EAGLE's and other heads have the model_type of their target.
    """
    for key in _STATE_KEYS:
        if fields.values.get(key):
            raise _states_error(fields, key, fields.values[key])
    for name in fields.items("architectures") or ():
        if isinstance(name, str) and _HEADS.search(name):
            raise _states_error(fields, "architectures", name)


def _states_error(fields: Fields, key: str, value: object) -> ExportError:
    return fields.error(
        f"this drafter reads the target's hidden states ({fields.prefix}{key} "
        f"{format_value(value)}), which is not supported: choose a drafter that reads only the "
        "text, such as PARD's"
    )


def read_mask_token(fields: Fields, vocab_size: int) -> int | None:
    """Return the id of the mask token; None if the configuration names none.

    vocab_size: number of rows of the embedding.

    Raises:
        ExportError: if the id has no embedding, if two keys contradict each other, or if the model
        also reads the target's hidden states.
    """
    for key in (*_PLAIN_KEYS, _DFLASH):
        fields.mark_read(key)
    dflash = fields.table(_DFLASH) if fields.values.get(_DFLASH) is not None else None
    stated = {
        key: fields.get(key, int) for key in _PLAIN_KEYS if fields.values.get(key) is not None
    }
    if dflash is not None:
        stated[f"{_DFLASH}.mask_token_id"] = dflash.get("mask_token_id", int)
    if not stated:
        return None
    _refuse_states(fields, dflash)
    for key in _INERT_KEYS:
        fields.mark_read(key)
    if fields.values.get("pard2"):
        log.warning(
            "%s: exported for drafting without the target's hidden states, which a PARD-2 model "
            "can also read",
            fields.where,
        )
    for key, token in stated.items():
        if not 0 <= token < vocab_size:
            raise fields.error(
                f"{key} is {token}, but must be the id of a row of the embedding, 0…"
                f"{vocab_size - 1}"
            )
    if len(set(stated.values())) > 1:
        raise fields.error(f"{' and '.join(stated)} name different mask tokens")
    return next(iter(stated.values()))


def read_drafts_per_pass(fields: Fields) -> int | None:
    """Return the number of drafts of a pass that a model with a mask token was trained for.

    None if the configuration does not state it.

    Raises:
        ExportError: if it is no count, or if two keys contradict each other.
    """
    for key in _COUNT_KEYS:
        fields.mark_read(key)
    tables = [fields]
    if fields.values.get(_DFLASH) is not None:
        tables.append(fields.table(_DFLASH))
    stated = {
        f"{table.prefix}{key}": table.count(key)
        for table in tables
        for key in _COUNT_KEYS
        if table.values.get(key) is not None
    }
    if len(set(stated.values())) > 1:
        raise fields.error(f"{' and '.join(stated)} name different numbers of drafts")
    if stated:
        return next(iter(stated.values()))
    return _PARD2_DRAFTS if fields.values.get("pard2") else None


def _refuse_states(fields: Fields, dflash: Fields | None) -> None:
    """Raise `ExportError` for a drafter that reads more than the text and mask tokens."""
    tables = [fields] if dflash is None else [fields, dflash]
    for table in tables:
        for key in _STATE_KEYS:
            if table.values.get(key):
                raise _states_error(table, key, table.values[key])
            table.mark_read(key)
    if dflash is not None and not dflash.get("causal", bool, default=False):
        raise fields.error(
            f"the mask tokens of this drafter see each other in both directions ({dflash.prefix}"
            "causal is not true), which is not supported: choose a drafter with causal attention, "
            "such as PARD's"
        )
    for table in tables:
        table.mark_read(_SHIFT_KEY)
    shifted = [table.get(_SHIFT_KEY, bool) for table in tables if _SHIFT_KEY in table.values]
    if not all(shifted or [dflash is None]):
        raise fields.error(
            f"a mask token of this drafter predicts the token at its own place ({_SHIFT_KEY} is "
            "not true), and not the next one, which is not supported: choose a drafter such as "
            "PARD's"
        )
