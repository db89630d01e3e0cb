"""Chats that trip templates: every role, tools, reasoning, odd spaces and scripts, long and empty texts."""

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Tells the weather, \"as is\".",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Where, e.g. Tromsø"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "default": 3}}, "required": ["city"]}}}
SEARCH = {"type": "function", "function": {
    "name": "search", "description": "Finds <pages> & people's notes",
    "parameters": {"type": "object", "properties": {
        "z_query": {"type": "array", "items": {"type": "string"}},
        "a_filter": {"type": "object", "properties": {"since": {"type": ["string", "null"]}}}}, "required": []}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def call(name, arguments, call_id="call00001"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chats():
    """[{"messages", "tools"?, "kwargs"?, "prompt"?}]"""
    hi = [user("Hi"), assistant("Hello!")]
    return [
        {"messages": hi},
        {"messages": [system("Be brief."), user("Name a prime."), assistant("7")]},
        {"messages": [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f")]},
        {"messages": [system("  You are\n\nkind. "), user("  spaced\tout \n"), assistant("\n lead and trail \n\n")]},
        {"messages": [user("naïve café — 東京 🙂 👩‍🚀"), assistant("ÅÄÖ ½ 한국어 \u2028 \u00a0 ﬁ ẞ")]},
        {"messages": [user("What's <b>\"this\"</b> & 'that'? {{ x }} {% y %} {# z #}"), assistant("It's <i>\\n</i>: \"{}\"; 'q'")]},
        {"messages": [user("Think."), assistant("<think>\nFirst, I look.\n</think>\n\nDone.")]},
        {"messages": [user("One?"), assistant("1", reasoning_content="It is one."), user("Two?"),
                      assistant("2", reasoning_content="After one\ncomes two.\n")]},
        {"messages": [user("Three?"), assistant("3", reasoning_content="Two and one.")], "kwargs": {"enable_thinking": False}},
        {"messages": [system("Use tools."), user("Weather in Oslo?"),
                      assistant("", tool_calls=[call("get_weather", {"city": "Oslo", "days": 2})]),
                      {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "{\"t\": -3.5}"},
                      assistant("It is -3.5 °C.")], "tools": [WEATHER, SEARCH]},
        {"messages": [user("Find it"), assistant("Looking.", tool_calls=[
            call("search", {"z_query": ["a", "b'c"], "a_filter": {"since": None, "deep": [1, 2.5, True, {"k": "v\n"}]}}),
            call("get_weather", {"city": "東京"}, "call00002")]),
            {"role": "tool", "name": "search", "tool_call_id": "call00001", "content": "none <found> & \"gone\""},
            {"role": "tool", "name": "get_weather", "tool_call_id": "call00002", "content": "mild"},
            assistant("Nothing, but mild.")], "tools": [SEARCH, WEATHER]},
        {"messages": [user("Tune it at 0.00003"), assistant("", tool_calls=[call("tune", {"lr": 1e-5, "eps": 2.5e-12, "decay": 0.1})])],
         "tools": [{"type": "function", "function": {"name": "tune", "description": "Tunes", "parameters": {
             "type": "object", "properties": {"lr": {"type": "number", "minimum": 1e-7, "description": "rate"}}, "required": ["lr"]}}}]},
        {"messages": [user("Only tools are there"), assistant("No need for them.")], "tools": [WEATHER]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call("search", {})]} if i == 1 else m
                      for i, m in enumerate([user("go"), None, {"role": "tool", "name": "search", "tool_call_id": "call00001",
                                             "content": "ok"}, assistant("went")])], "tools": [SEARCH]},
        {"messages": [user("empty answer"), assistant("")]},
        {"messages": [user(""), assistant("to nothing")]},
        {"messages": [{"role": "developer", "content": "Be exact."}, user("pi?"), assistant("3.14159")]},
        {"messages": [user("x" * 700 + "\n" + "long line " * 60), assistant("line\r\nbreaks\r\n" * 20)]},
        {"messages": [user("first"), user("second"), assistant("both")]},
        {"messages": [system("s"), *hi, user("And now?")], "prompt": True},
        {"messages": [user("plan"), assistant("Step 1", reasoning_content="r1"), user("go on")], "prompt": True,
         "kwargs": {"enable_thinking": True}},
        {"messages": [user("the title is 'they're OK'"), assistant("I'm o'clock\x1c-ish\x85 end\u3000")]},
    ]
