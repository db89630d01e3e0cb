//! What a job costs: counted, predicted, measured by a pilot, and shown.

#[path = "../support/golden.rs"]
#[allow(dead_code)]
mod golden;
#[path = "../job/program.rs"]
#[allow(dead_code)]
mod program;

mod counting;
mod kernels;
mod pilot;
mod plan;
mod told;

/// The tokenizer files of a checkpoint, beside a corpus made by hand.
fn golden_tokenizer(teacher: &str, folder: &std::path::Path) {
    std::fs::create_dir_all(folder).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let from = std::path::Path::new(teacher).join(name);
        std::fs::copy(from, folder.join(name)).unwrap();
    }
}
