//! Shapes of rows, keys and roles that are known and read by another name or not at all, and what
//! is said about each. Nothing here decides anything: a row is refused first, and advised then.

use serde_json::{Map, Value};

/// What a row holds, `key` or `key/index/key`, and what to do with it. The first that fits counts.
const ROWS: [(&[&str], &str); 27] = [
    (
        &["instruction", "chosen"],
        "a preference row; --map output=chosen reads the chosen answer as alpaca",
    ),
    (
        &["prompt/0", "chosen/0"],
        "a preference row; --map completion=chosen trains the chosen answer",
    ),
    (
        &["chosen/0"],
        "a preference row; --map messages=chosen trains the chosen chat",
    ),
    (
        &["prompt", "chosen"],
        "a preference row; --map completion=chosen trains the chosen answer",
    ),
    (
        &["chosen"],
        "a preference row; --map text=chosen trains the chosen text",
    ),
    (
        &["preferred_output"],
        "a preference row; make messages of its input and preferred_output",
    ),
    (
        &["reward_model"],
        "a row for reinforcement learning, which holds no answer to learn",
    ),
    (
        &["prompt/replies"],
        "a tree of messages (OASST); make a row of messages of each path through it, with the role user for prompter",
    ),
    (
        &["query", "answers", "tools"],
        "a question and the calls that answer it (xLAM); make messages of them, with answers as tool_calls",
    ),
    (
        &["chat"],
        "a chat in one text (Glaive); make messages of its USER, ASSISTANT and FUNCTION RESPONSE",
    ),
    (
        &["contents/0/parts"],
        "a chat of Gemini's; make messages of contents, with the texts of the parts as content and the role assistant for model",
    ),
    (
        &["article", "question", "answer"],
        "--map instruction=question,input=article,output=answer reads them as alpaca",
    ),
    (
        &["system_prompt", "question", "response"],
        "--map system=system_prompt,query=question reads them as a chat",
    ),
    (
        &["question", "context", "answer"],
        "--map instruction=question,input=context,output=answer reads them as alpaca",
    ),
    (
        &["question", "answer"],
        "--map query=question,response=answer reads them as a chat",
    ),
    (
        &["question", "response"],
        "--map query=question reads them as a chat",
    ),
    (
        &["problem", "solution"],
        "--map query=problem,response=solution reads them as a chat",
    ),
    (
        &["instruction", "context", "response"],
        "--map input=context,output=response reads them as alpaca",
    ),
    (
        &["instruction", "response"],
        "--map output=response reads them as alpaca",
    ),
    (
        &["prompt", "response"],
        "--map query=prompt reads them as a chat, --map completion=response as plain prompt and completion",
    ),
    (&["dialog"], "--map messages=dialog reads it as a chat"),
    (&["contents"], "--map messages=contents reads it as a chat"),
    (
        &["role", "content"],
        "a message without its chat; write the messages of a chat as one row, in a list under messages",
    ),
    (
        &["from", "value"],
        "a message without its chat; write the messages of a chat as one row, in a list under conversations",
    ),
    (&["content"], "--map text=content reads it as text"),
    (&["prompt"], "a row without an answer to learn"),
    (
        &["data/0"],
        "rows in a list under one key; jq -c '.data[]' writes them as JSON lines",
    ),
];

const PREFERENCE: &str = "expected chats with their answers, found a preference row; put the chosen answer behind conversations, \
     or --format sharegpt reads conversations alone";
/// Rows that have a format's keys and mean something else.
const MISTAKEN: [(&[&str], &str); 3] = [
    (
        &["conversations", "chosen/value", "rejected/value"],
        PREFERENCE,
    ),
    (
        &["conversations", "chosen/content", "rejected/content"],
        PREFERENCE,
    ),
    (
        &["text", "message_id", "parent_id"],
        "expected whole chats or texts, found one message of a tree (OASST); make a row of messages of each path through it, \
     with the role user for prompter; --format text trains each message as a text of its own",
    ),
];

/// Keys of messages, and what they are here.
const KEYS: [(&[&str], &str); 6] = [
    (&["function_call"], "write it as tool_calls, its newer form"),
    (
        &["training", "trainable", "is_trained"],
        "it says whether the message is trained: --map train=KEY",
    ),
    (
        &["loss_weight"],
        "it says whether the message is trained: --map weight=KEY",
    ),
    (
        &["mask", "masked"],
        "it says that the message is not trained: write \"train\": false for that",
    ),
    (
        &["train_on_eot", "train_on_eos"],
        "the end of a turn is trained with its turn: take the key out, or write \"train\": false for the whole message",
    ),
    (&["parts"], "write the texts of the parts as content"),
];

/// Roles by the names that others give them.
const ROLES: [(&str, &str); 11] = [
    ("human", "user"),
    ("prompter", "user"),
    ("customer", "user"),
    ("gpt", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("chatbot", "assistant"),
    ("ai", "assistant"),
    ("function", "tool"),
    ("observation", "tool"),
    ("ipython", "tool"),
];

/// What to do with a row of no format.
pub fn of_row(row: &Map<String, Value>) -> String {
    match advice(&ROWS, row) {
        Some(advice) => format!(": {advice}"),
        None => "; --map gives keys other names".to_owned(),
    }
}

/// What is wrong with a row that has a format's keys by chance.
pub fn mistaken(row: &Map<String, Value>) -> Option<&'static str> {
    advice(&MISTAKEN, row)
}

/// What to do with a key of a message that is not read.
pub fn of_key(key: &str) -> String {
    match KEYS.iter().find(|(keys, _)| keys.contains(&key)) {
        Some((_, advice)) => advice.replace("KEY", key),
        None => "--map gives it another name, --ignore-keys leaves it unread".to_owned(),
    }
}

/// What to do with a message that has no role.
pub fn of_message(message: &Map<String, Value>) -> &'static str {
    match message.contains_key("from") && message.contains_key("value") {
        true => {
            "; --map role=from,content=value --roles human=user,gpt=assistant reads ShareGPT's messages"
        }
        false => "; --map role=NAME,content=NAME says what they are called",
    }
}

/// How to say what a role means.
pub fn of_role(role: &str) -> String {
    let known = ROLES.iter().find(|(theirs, _)| *theirs == role);
    let (theirs, ours) = known.copied().unwrap_or(("NAME", "ROLE"));
    format!("--roles {theirs}={ours} says what it means")
}

fn advice(table: &[(&[&str], &'static str)], row: &Map<String, Value>) -> Option<&'static str> {
    let there = |path: &&str| match path.split_once('/') {
        None => row.contains_key(*path),
        Some((key, below)) => row
            .get(key)
            .is_some_and(|v| v.pointer(&format!("/{below}")).is_some()),
    };
    let found = table.iter().find(|(paths, _)| paths.iter().all(there));
    found.map(|(_, advice)| *advice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn preference_rows_are_told_what_reads_them() {
        let row = json!({"instruction": "i", "input": "x", "chosen": "o", "rejected": "p"});
        let advice = of_row(row.as_object().unwrap());
        assert!(advice.contains("--map output=chosen"), "{advice}");
        let row = json!({"conversations": [], "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}});
        let advice = mistaken(row.as_object().unwrap()).unwrap();
        assert!(advice.contains("a preference row"), "{advice}");
        let row = json!({"conversations": [], "chosen": null, "rejected": null});
        assert_eq!(mistaken(row.as_object().unwrap()), None);
    }
}
