"""The spellings that rows and messages have in this field, and what they ask of whoever trains on them."""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isnan
from typing import Any

from ..files import shortened

Messages = list[dict[str, Any]]

COLUMNS = {
    "messages": ("conversations", "conversation"),
    "question": ("instruction", "query", "problem", "input"),
    "answer": ("response", "output", "solution"),
    "completion": ("chosen",),
    "system": ("system_prompt",),
}
MEDIA = ("image", "images", "video", "videos", "audio", "audios", "pixel_values")
TEMPLATE_ARGUMENTS = ("documents", "enable_thinking", "thinking", "reasoning_effort")
_CALLS = ("tool_call", "function_call")
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "function_response", "tool_result", "function_result"), "tool"),
    **{role: role for role in ("user", "assistant", "system", "developer", "tool", *_CALLS)},
}
# How a message, or a row, says that it is trained on, and the value that means so.
_WISHES = dict.fromkeys(
    ("weight", "loss_weight", "loss_scale", "loss_mask", "train", "training", "trainable", "loss", "supervise"), 1
)
_WISHES |= {"masked": 0, "ignore": 0}
_ROW_WISHES = dict.fromkeys(("weight", "loss_weight", "loss_scale", "sample_weight", "kto_tag"), 1)
# Wishes that cannot be honoured, and the one value that asks for nothing.
_REFUSED = dict.fromkeys(("mask", "train_detail", "train_on_turn"))
_ROW_REFUSED = {
    **dict.fromkeys(("train_on_input", "train_on_inputs", "train_on_prompt", "mask_history"), 0),
    **dict.fromkeys(("train_on_last_turn", "train_only_last_turn", "train_on_last_turn_only", "only_last"), 0),
    **dict.fromkeys(("mask_prompt", "train_on_responses_only", "assistant_only_loss", "completion_only_loss"), 1),
    "mask": "user",  # NeMo's: whose turns have no loss
}
MASKS = (
    "loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "response_mask", "train_mask", "label_mask",
    "tool_mask",
)  # fmt: skip
# Other names that ask for the same, if their values are flags or lists.
_ASKS = re.compile(
    r"(^|_)(loss(es)?|weights?|train(ed|ing|able)?|learn|supervised?|mask(s|ed)?|ignored?|excluded?|skip)$"
    r"|(^|_)train_on_|lossmask|mask_out"
)
_NO_WISHES = {*MASKS, "attention_mask", "special_tokens_mask"}


def canonical(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row holds by the first of the names of each of its [`COLUMNS`]; only text is read."""
    given = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
    is_null = {name: value is None or (isinstance(value, float) and isnan(value)) for name, value in given.items()}
    given = {name: value for name, value in given.items() if not is_null[name]}
    for name in MEDIA:
        if name in given and (not hasattr(given[name], "__len__") or len(given[name])):
            raise ValueError(f"{name!r} is given, and only text is read: leave out rows with images, videos or sound")
    for name, others in COLUMNS.items():
        if found := [given[each] for each in (name, *others) if each in given]:
            given[name] = next((each for each in found if each != ""), "")
    for name in ("input", "context"):  # Alpaca's and Dolly's: below the instruction
        more = given.get(name)
        asked = "prompt" if given.get("question", more) is more else "question"
        if more and isinstance(more, str) and isinstance(given.get(asked), str) and "completion" not in given:
            given["question"] = given[asked] = f"{given[asked]}\n\n{more}"
    if "chosen" in given and not isinstance(given["chosen"], str) and "messages" not in given:
        if not (messages := read_messages(given["chosen"])) or messages[0]["role"] != "assistant":
            given["messages"] = messages  # with the prompt
    if given.get("finish_reason") == "length":  # as servers say it
        given.setdefault("finished", False)
    if isinstance(given.get("mask"), str):
        given["mask"] = ROLES.get(given["mask"].lower(), given["mask"])
    for name in given.keys() & {"finished", "enable_thinking", *_ROW_WISHES, *_ROW_REFUSED} - {"mask"}:
        if isinstance(given[name], str):  # CSV
            given[name] = parsed(given[name].lower(), name)
    return given


def only(given: Mapping[str, Any], name: str) -> Any:
    """Return a column if no other of its names says something else; more may stand below a question."""
    for other in (each for each in COLUMNS.get(name, ()) if each in given and each != "input"):
        if not str(given[name]).startswith(str(given[other])):
            said, unlike = (shortened(given[each], size=60) for each in (name, other))
            raise ValueError(f"{name!r} is {said}, but {other!r} is {unlike}: drop the column that is not meant")
    return given[name]


def answer_of(given: Mapping[str, Any], name: str, as_text: bool = False) -> Any:
    """Return an answer or completion: messages, or its text if it is one and that is wanted."""
    if not isinstance(answer := only(given, name), str | list | tuple | Mapping):
        raise ValueError(f"{name} must be a text or messages, got {shortened(answer)}")
    if not isinstance(answer, str):
        return read_messages(answer)
    if as_text:
        return answer
    thoughts = {"reasoning_content": given["reasoning_content"]} if "reasoning_content" in given else {}
    return read_messages([{"role": "assistant", "content": answer} | thoughts])


def conversation(given: Mapping[str, Any], name: str) -> Messages:
    """Return messages, or a user's, after the `system` prompt and the `history` that a row gives apart."""
    said = given[name] if name == "messages" else only(given, name)
    is_text = name != "messages" and isinstance(said, str)
    messages = read_messages([{"role": "user", "content": said}] if is_text else said)
    context, history = [], parsed(given.get("history") or [], "history")
    if given.get("system") and (not messages or messages[0]["role"] not in ("system", "developer")):
        context.append({"role": "system", "content": given["system"]})
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"history must be a list of [question, answer], got {shortened(history)}")
        context += [{"role": role, "content": said} for role, said in zip(("user", "assistant"), pair, strict=True)]
    return read_messages(context) + messages


def read_messages(messages: Any) -> Messages:
    """Return messages as chat templates take them, from OpenAI's spelling, ShareGPT's, and their relatives."""
    messages = parsed(messages, "messages")
    if isinstance(messages, Mapping) and isinstance(messages.get("role", messages.get("from")), str):
        messages = [messages]
    if isinstance(messages, Mapping):
        columns = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in messages.items()}
        if all(isinstance(column, list) for column in columns.values()):
            messages = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"messages must be a list of dicts with 'role' and 'content', got {shortened(messages)}")
    read: Messages = []
    for place, given in enumerate(messages):
        message = _read_message(place, given)
        if message["role"] in _CALLS:  # part of the turn that it ends
            calls = _read_calls(place, message.pop("content", None))
            message |= {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}
            if read and read[-1]["role"] == "assistant":
                before = read.pop()
                message = message | before | {"tool_calls": before.get("tool_calls", []) + message["tool_calls"]}
        read.append(message)
    return read


def _read_message(place: int, given: Any) -> dict[str, Any]:
    message = without_nones(given) if isinstance(given, Mapping) else {}  # tables add nulls, to tool calls, too
    speaker = message.pop("from", None)
    role = message.pop("role", speaker)
    name = next((name for name in ("content", "value", "text", "parts") if name in message), None)
    if "function_call" in message:  # before there were several
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    says = message.keys() & {"tool_calls", "reasoning_content", "thinking", "reasoning"}
    if not isinstance(role, str) or (name is None and not says):
        raise ValueError(f"message {place} must be a dict with 'role' and 'content', got {shortened(given)}")
    message = {"role": ROLES.get(role.strip().lower(), role)} | message
    if name is not None:
        content = message.pop(name)
        message["content"] = content if message["role"] in _CALLS else _read_content(place, message["role"], content)
    if "tool_calls" in message:
        message["tool_calls"] = _read_calls(place, message["tool_calls"])
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    return message


def _read_content(place: int, role: str, content: Any) -> Any:
    """Return the text of a content or of its parts; what a tool returns, and thoughts, as they are."""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind in ("text", "input_text", "output_text") and isinstance(text, str):
            texts.append(text)
        elif kind in ("thinking", "reasoning") or (role == "tool" and not str(kind).startswith(MEDIA)):
            return content
        else:
            found = f"message {place} has {shortened(part, size=60)} for its content or a part of it"
            raise ValueError(f"{found}, and only text is read: write it as text, and calls of tools as 'tool_calls'")
    return "".join(texts)


def _read_calls(place: int, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with arguments as objects, as templates and servers take them; OpenAI writes them as JSON."""
    calls, read = parsed(calls, f"the tool calls of message {place}"), []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"message {place} must call tools by 'name' and 'arguments', got {shortened(call)}")
        function = dict(function)
        given = [function.pop(name) for name in ("arguments", "parameters", "input") if name in function]
        function["arguments"] = given[0] if given else {}
        with contextlib.suppress(ValueError):
            function["arguments"] = parsed(function["arguments"], "arguments")
        read.append({**call, "function": function} if "function" in call else function)
    return read


# ---- for the template


def respelt(messages: Messages) -> Iterator[Messages]:
    """Yield what a template may need instead: `system` for `developer`, calls as those of functions, arguments as
    JSON; or contents as parts."""
    other = [message | ({"role": "system"} if message["role"] == "developer" else {}) for message in messages]
    other = [({"content": ""} if "tool_calls" in message else {}) | message for message in other]
    for message in (each for each in other if "tool_calls" in each):
        calls = [call.get("function", call) for call in message["tool_calls"]]
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if other != messages:
        yield other
    if (written := map_calls(other, _with_json)) != other:
        yield written
    parts = [[{"type": "text", "text": message.get("content")}] for message in messages]
    yield [
        message | ({"content": part} if isinstance(part[0]["text"], str) else {})
        for message, part in zip(messages, parts, strict=True)
    ]


def map_calls(messages: Messages, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Messages:
    """Change the functions that are called."""
    return [
        message
        if "tool_calls" not in message
        else message
        | {"tool_calls": [
            call | {"function": change(call["function"])} if "function" in call else change(call)
            for call in message["tool_calls"]
        ]}
        for message in messages
    ]  # fmt: skip


def _with_json(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    return function | {"arguments": arguments if is_text else json.dumps(arguments, ensure_ascii=False)}


def named(function: dict[str, Any]) -> dict[str, Any]:
    """Give a call a name that stands nowhere else."""
    return function | {"name": f"{function['name']}\ue000"}


def unseen(messages: Messages, text: str, named_text: str) -> list[tuple[bool, str]]:
    """Return what of a conversation its rendering lacks, and whether that must not be.

    Templates may change what is said by known roles, but not leave out tool calls, or roles that they do not know.
    Calls are looked for in a rendering of [`named`] ones.
    """
    missing = []
    for place, message in enumerate(messages):
        role, content = message["role"], message.get("content", "")
        calls = [named(call.get("function", call))["name"] for call in message.get("tool_calls", ())]
        if not all(name in named_text for name in calls):
            missing.append((True, f"the tool calls of message {place}"))
        keys = ("'text'", '"text"', "'thinking'", '"thinking"', "'reasoning'", '"reasoning"')
        is_dumped = not isinstance(content, str) and any(f"{key}: " in text for key in keys)
        if role == "assistant" and is_dumped:
            missing.append((True, f"the thoughts of message {place} (it may read 'reasoning_content')"))
        if role not in ("assistant", "tool"):
            said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            if said.strip() not in text or is_dumped:
                missing.append((role not in ("user", "system"), f"message {place}, of role {role!r}"))
    return missing


def without_wishes(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in _WISHES and name not in _REFUSED}


def template_arguments(given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the tools and the other arguments for the chat template that a row brings."""
    functions = parsed(given.get("functions") or [], "functions")
    tools = parsed(given.get("tools") or [{"type": "function", "function": each} for each in functions], "tools")
    if not isinstance(tools, list | tuple):
        raise ValueError(f"tools must be a list of tool descriptions, or that as JSON, got {shortened(tools)}")
    kwargs = parsed(given.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"chat_template_kwargs must be an object, got {shortened(kwargs)}")
    if taken := kwargs.keys() & {"tokenize", "add_generation_prompt", "continue_final_message", "return_dict"}:
        raise ValueError(f"chat_template_kwargs cannot set {sorted(taken)[0]}: whoever renders decides it")
    own = {name: given[name] for name in TEMPLATE_ARGUMENTS if name in given}
    if not isinstance(own.get("thinking", True), bool):
        del own["thinking"]  # a text
    return tools or None, own | without_nones(kwargs)


# ---- for the trainer


def is_row_wanted(given: Mapping[str, Any]) -> bool:
    """Return whether a row is to be trained on; a `label` tells liked answers from others."""
    return given.get("label") is not False and all(_wishes(given, _ROW_WISHES, _ROW_REFUSED, ""))


def is_supervised(place: int, message: Mapping[str, Any]) -> bool:
    """Return whether a message is an answer to train on, by its role and by what it says itself."""
    wishes, is_answer = _wishes(message, _WISHES, _REFUSED, f"message {place}: "), message["role"] == "assistant"
    if not is_answer and any(wishes):
        asks = f"message {place}, of role {message['role']!r}, asks to be trained on"
        raise ValueError(f"{asks}, but a draft learns only what the target writes: drop the wish")
    return is_answer and all(wishes)


def _wishes(given: Mapping[str, Any], names: Mapping[str, int], refused: Mapping[str, Any], where: str) -> list[bool]:
    known, wishes = {*names, *refused}, []
    flags = [
        name
        for name, value in given.items()
        if isinstance(value, list) or (type(value) in (int, bool) and value in (0, 1))
    ]
    others = {name for name in flags if _ASKS.search(name)} - _NO_WISHES - known
    for name in given.keys() & known | others:
        value = given[name]
        meant = () if name in others else (refused[name],) if name in refused else (0, 1)
        if isinstance(value, list | dict) or value not in meant:
            raise ValueError(
                f"{where}{name}: {shortened(value)} cannot be honoured: answers are supervised whole or not at all; "
                "say 'weight': 0 of messages and rows that are context only, and give tokens a 'loss_mask'; "
                "drop what means something else"
            )
        wishes += [value == names[name]] if name in names else []
    return wishes


# ---- values


def integers(name: str, values: Any) -> list[int]:
    """Return whole numbers from a list, an array or a tensor, or a batch of one of them."""
    given = parsed(values.tolist() if hasattr(values, "tolist") else values, name)
    given = list(given) if isinstance(given, Iterable) else [given]
    given = given[0] if len(given) == 1 and isinstance(given[0], list) else given
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if given == (whole := [int(value) for value in given]) and max(map(abs, whole), default=0) < 2**63:
            return whole
    raise ValueError(f"{name} must be a list of whole numbers of 64 bits, got {shortened(values)}")


def parsed(value: Any, what: str) -> Any:
    """Read a value that a table holds as JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must not be a text, unless it is JSON, got {shortened(value)}") from error


def without_nones(value: Any) -> Any:
    """Drop the `None`s that tables put into dicts with different keys."""
    if isinstance(value, Mapping):
        return {name: without_nones(inner) for name, inner in value.items() if inner is not None}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [without_nones(inner) for inner in value] if isinstance(value, list | tuple) else value
