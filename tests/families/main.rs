//! Every family against Hugging Face transformers, on tiny teachers that
//! `scripts/make_teachers.py` made: the scores, and that each feature counts.

#[path = "../support/golden.rs"]
#[allow(dead_code)]
mod golden;

mod bits;
mod context;
mod goldens;
mod matters;
mod mutations;
mod published;
mod teachers;
