"""The text of a prompt as encoders read it."""

from __future__ import annotations

import html


def clean_prompt(prompt: str) -> str:
    """Return the text that is tokenized, as ReCamMaster's code and diffusers' Wan pipelines clean it.

    Broken encodings and HTML entities are repaired, full-width punctuation and curly quotes become ASCII, and every run
    of white space becomes one space. ASCII text without "&" only changes in white space.
    """
    import ftfy  # here: what plans or measures a model encodes no prompts

    repaired = html.unescape(html.unescape(ftfy.fix_text(prompt)))  # twice: "&amp;lt;" occurs in scraped captions
    return " ".join(repaired.split())
