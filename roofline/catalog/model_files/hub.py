"""Fetches the config.json of a hub id, and nothing else, into the local Hugging Face cache."""

from __future__ import annotations

import os
from pathlib import Path

from ridgeplan.roofline.catalog.shapes import UnknownModel

REACH_S = 3  # for the hub's first answer
CONFIG = "config.json"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads them


def fetched_config(hub_id: str) -> Path:
    """The cached config.json of `hub_id`, downloaded now.

    Raises UnknownModel, one line: at once where an offline variable is set, after REACH_S where the hub does not
    answer, or with the hub's own reason.
    """
    forbidden = next((name for name in OFFLINE if os.environ.get(name, "").upper() in TRUE), None)
    if forbidden:
        raise UnknownModel(
            f"{hub_id} is not in the local Hugging Face cache, and {forbidden} is set; {_advice(hub_id)}"
        )
    from huggingface_hub import constants, get_session, hf_hub_download

    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_S)  # the download itself would retry for minutes
    except Exception as error:  # whatever the HTTP library of the day raises where there is no network
        raise UnknownModel(
            f"{hub_id} is not in the local Hugging Face cache, and {constants.ENDPOINT} cannot be reached within "
            f"{REACH_S} s; {_advice(hub_id)}"
        ) from error
    try:
        return Path(hf_hub_download(hub_id, CONFIG, etag_timeout=REACH_S))
    except (OSError, ValueError) as error:  # huggingface_hub's own errors are of these kinds
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnknownModel(f"cannot download {CONFIG} of {hub_id}: {reason[:200]}") from error


def _advice(hub_id: str) -> str:
    return f"`hf download {hub_id} {CONFIG}` gets it where the hub is reached"
