//! `show --teacher`: a text or chat scored on the spot, every token with its log-prob.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};

use super::show::quoted;
use super::teacher::open_teacher;
use super::text::{self, Align};
use super::{Outcome, Status};
use crate::backend::cpu::Cpu;
use crate::cli::ShowArgs;
use crate::corpus::{
    Chat, ChatRules, ChatTemplate, CorpusShard, Decoder as TokenDecoder, LossRule, TemplatePlan,
    TextTokenizer, encode_chat,
};
use crate::model::{Decoder, Limits, Teacher, Unknown, Vocabulary};
use crate::products::{Dtype, Product, ProductArray, ProductPlan};
use crate::score::{Proceed, ShardJob, score_shard};

/// Rows of a logits slice: small, since one text has few.
const HEAD_CHUNK: usize = 64;

/// # Errors
/// A broken teacher or tokenizer, a chat that can't be rendered, a text beyond the context.
pub fn score_text(folder: &Path, args: &ShowArgs) -> Result<Outcome> {
    let unknown = match args.allow_unknown_config {
        true => Unknown::Allow,
        false => Unknown::Refuse,
    };
    let teacher = open_teacher(folder, unknown)?.teacher;
    let tokenizer = TextTokenizer::load(folder)?;
    let tokens = match (&args.text, &args.messages) {
        (Some(text), _) => plain_tokens(&tokenizer, text)?,
        (None, Some(file)) => chat_tokens(&tokenizer, file)?,
        (None, None) => return Err(anyhow!("expected --text or --messages")),
    };
    let context = teacher.description.context;
    ensure!(
        tokens.len() <= context,
        "expected at most {context} tokens, the teacher's context (max_position_embeddings, or what its rope is scaled to), found {}",
        tokens.len()
    );
    let vocab = teacher.description.vocab;
    if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab) {
        return Err(anyhow!(
            "expected token ids below {vocab}, the teacher's vocabulary, found {id}: tokenizer and teacher don't belong together"
        ));
    }
    let logp = token_logps(&teacher, &tokenizer, &tokens)?;
    Ok(outcome(&TokenDecoder::new(tokenizer), &tokens, &logp))
}

fn plain_tokens(tokenizer: &TextTokenizer, text: &str) -> Result<Vec<i32>> {
    let encoded = tokenizer.encode_plain(text);
    Ok(encoded
        .map_err(|problem| anyhow!("text: {}", problem.message))?
        .ids)
}

fn chat_tokens(tokenizer: &TextTokenizer, file: &Path) -> Result<Vec<i32>> {
    let place = file.display();
    let bytes = std::fs::read(file).with_context(|| format!("{place}: can't read"))?;
    let value: Value =
        serde_json::from_slice(&bytes).with_context(|| format!("{place}: expected JSON"))?;
    let messages = match value {
        Value::Object(mut row) => row
            .remove("messages")
            .with_context(|| format!("{place}: expected a key messages, found none"))?,
        list => list,
    };
    let named = |problem: crate::corpus::RowProblem| anyhow!("{place}: {}", problem.message);
    let chat = Chat::new(messages).map_err(named)?;
    let template = ChatTemplate::load(tokenizer, &TemplatePlan::default())?;
    let rules = ChatRules::new(LossRule::All);
    let row = encode_chat(tokenizer, &template, None, &chat, rules).map_err(named)?;
    Ok(row.tokens)
}

/// Log-prob of every token but the first, (T - 1).
fn token_logps(teacher: &Teacher, tokenizer: &TextTokenizer, tokens: &[i32]) -> Result<Vec<f32>> {
    let (offsets, mask) = ([0, tokens.len() as i64], vec![1; tokens.len()]);
    let limits = Limits {
        tokens: tokens.len().max(1),
        sequence: tokens.len().max(1),
        head_chunk: HEAD_CHUNK,
        wave: 1,
    };
    let vocabulary = Vocabulary {
        scored: teacher.description.vocab,
        tokenizer: tokenizer.vocab_size(),
    };
    let products = ProductPlan {
        k: 1,
        logp_dtype: Dtype::F32,
        extra: vec![Product::TargetLogp],
    };
    let job = ShardJob {
        shard: CorpusShard::new(tokens, &offsets, &mask)?,
        sequences: 0..1,
        token_budget: limits.tokens,
        wave: 1,
        products: &products,
    };
    let backend = Cpu;
    let mut decoder = Decoder::new(&backend, teacher, limits, vocabulary)?;
    let scored = score_shard(&mut decoder, &job, &mut |_| Proceed::Go)?;
    let arrays = scored.map(|s| s.arrays).unwrap_or_default();
    let is_logp = |array: &&ProductArray| array.product == Product::TargetLogp;
    let array = arrays.iter().find(is_logp).context("no target log-probs")?;
    let (values, _) = array.bytes.as_chunks::<4>();
    Ok(values.iter().map(|v| f32::from_le_bytes(*v)).collect())
}

fn outcome(decoder: &TokenDecoder, tokens: &[i32], logp: &[f32]) -> Outcome {
    let sum: f64 = logp.iter().map(|&v| f64::from(v)).sum();
    let mean = (!logp.is_empty()).then(|| sum / logp.len() as f64);
    let of = |position: usize| position.checked_sub(1).map(|row| logp[row]);
    let rows: Vec<Vec<String>> = tokens
        .iter()
        .enumerate()
        .map(|(position, &id)| {
            vec![
                position.to_string(),
                id.to_string(),
                quoted(&decoder.piece(id)),
                of(position).map_or("-".to_owned(), |v| format!("{v:.4}")),
            ]
        })
        .collect();
    let columns = [
        ("position", Align::Right),
        ("id", Align::Right),
        ("token", Align::Left),
        ("log-prob", Align::Right),
    ];
    let figure = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.4}"));
    let facts = text::facts(&[
        ("tokens", tokens.len().to_string()),
        ("sum of log-probs", format!("{sum:.4}")),
        ("mean log-prob", figure(mean)),
        ("perplexity", figure(mean.map(|m| (-m).exp()))),
    ]);
    let listed = tokens.iter().enumerate().map(|(position, &id)| {
        json!({"position": position, "id": id, "token": decoder.piece(id), "logp": of(position)})
    });
    Outcome {
        text: format!("{}\n{facts}", text::table(&columns, &rows)),
        json: json!({
            "tokens": listed.collect::<Value>(),
            "sum_logp": sum,
            "mean_logp": mean,
            "perplexity": mean.map(|m| (-m).exp()),
        }),
        status: Status::Done,
    }
}
