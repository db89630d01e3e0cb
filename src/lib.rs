//! kdscore scores a fixed token corpus with a teacher language model and keeps, for every
//! position a student will train on, the teacher's top-k token ids, their log-probs and the
//! probability mass outside them.
//!
//! # How data flows
//!
//! ```text
//! source rows ─ corpus ─▶ corpus shard ─ batch ─▶ packed batch ─ model over backend ─▶ hidden rows
//!   ─ head, in chunks ─▶ logits slice ─ reduction ─▶ products ─ score ─▶ rows in their place
//!   ─ store ─▶ arrays ▶ hashes ▶ manifest
//! ```
//!
//! Data goes one way, and each arrow is a type: [`corpus::CorpusShard`], `batch::PackedBatch`,
//! [`products::ProductArray`], `store::Manifest`. A row is numbered before packing and carries
//! its target with it, so results go straight to their place and nothing is ever un-sorted.
//!
//! # The house
//!
//! | module | what it holds | may import, of this crate |
//! |---|---|---|
//! | [`canonical`] | canonical JSON, seals, sha256 | nothing |
//! | [`products`] | what a pass stores per row: names, dtypes, encoding | nothing |
//! | [`progress`] | the only code that draws | nothing |
//! | [`gpu`] | devices by their makers' figures | nothing |
//! | [`report`] | HTML pages and plots, made of strings | nothing |
//! | [`mapped`] | read-only memory maps | nothing |
//! | [`corpus`] | source rows, chat template, tokens and loss mask, shard views, the shift | canonical |
//! | [`backend`] | the trait with the shape of every op; the CPU; CUDA devices | products |
//! | [`batch`] | length sort and token budget: shard to packed batches | corpus |
//! | [`model`] | teacher description, weights, decoder, head | canonical, mapped, backend, batch, products |
//! | [`cost`] | FLOPs, bytes, memory plan: pure arithmetic | backend, gpu, model, products |
//! | [`store`] | arrays, manifests, the commit protocol, readers | canonical, mapped, corpus, products |
//! | [`score`] | one shard, start to end, on one screen | corpus, batch, model, backend, products |
//! | [`config`] | what the user typed, resolved once; identity | anything but commands |
//! | [`cli`] | what the user may type | nothing |
//! | [`commands`] | one file per command | everything |
//!
//! # Never
//!
//! - `score` opens no file, draws nothing and knows no store; it takes a callback.
//! - only `store` creates, renames or removes files.
//! - only `main` prints an error or ends the process.
//! - nothing above `backend` asks which device it runs on.
//! - only `backend` holds `unsafe` arithmetic, and each block says why it is sound.
//!
//! `tests/tidy.rs` reads the `use` lines and holds the code to this table.

pub mod backend;
pub mod batch;
pub mod canonical;
pub mod cli;
pub mod commands;
pub mod config;
pub mod corpus;
pub mod cost;
pub mod gpu;
pub mod mapped;
pub mod model;
pub mod products;
pub mod progress;
pub mod report;
pub mod score;
pub mod store;
