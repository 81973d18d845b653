"""The Mistral family: Llama's layout. A sliding window changes the attention, not the weights."""

from __future__ import annotations

import dataclasses

from megarl.models import llama

FAMILY = dataclasses.replace(llama.FAMILY, name="mistral")
