"""What transformers renders, generates and masks: the other side of every comparison."""
import datetime
import warnings

import transformers
from transformers.utils import chat_template_utils as utils

DATE = "2024-07-26"
RULES = "transformers-5" if int(transformers.__version__.split(".")[0]) >= 5 else "transformers-4"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(DATE)


utils.datetime = FixedDate
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()


def bytes_of(text, spans):
    """Character spans as byte spans."""
    return [[len(text[:a].encode()), len(text[:b].encode())] for a, b in spans]


def normalised(messages):
    return utils._normalize_chat_messages(messages) if RULES == "transformers-5" else messages


def render(source, chat, tokens=TOKENS):
    """{"text", "spans"} or {"refused": why}; spans in bytes, None without generation blocks."""
    marks = "{% generation" in source or "{%- generation" in source
    kwargs = dict(tokens, **chat.get("kwargs", {}))
    try:
        texts, spans = utils.render_jinja_template(
            [normalised(chat["messages"])], tools=chat.get("tools"), chat_template=source,
            return_assistant_tokens_mask=marks, add_generation_prompt=chat.get("prompt", False), **kwargs)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    text = texts[0]
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"refused": "lone surrogates"}
    return {"text": text, "spans": bytes_of(text, spans[0]) if marks else None}


def encode(tokenizer, source, chat):
    """{"ids", "mask"} or None where transformers fails; mask None without generation blocks."""
    marks = "{% generation" in source or "{%- generation" in source
    try:
        found = tokenizer.apply_chat_template(
            chat["messages"], tools=chat.get("tools"), chat_template=source, add_generation_prompt=chat.get("prompt", False),
            tokenize=True, return_dict=True, return_assistant_tokens_mask=marks, **chat.get("kwargs", {}))
    except Exception:
        return None
    return {"ids": list(found["input_ids"]), "mask": list(found["assistant_masks"]) if marks else None}
