//! Real templates against transformers. `scripts/template_check/check.py` fetches them, says where
//! the cases are and runs this.

mod cases;
mod checkpoints;

use std::path::Path;
use std::time::Instant;

use cases::{compare, read};
use checkpoints::{compare_checkpoints, expect_equal};

#[test]
fn real_templates_render_encode_and_mask_as_transformers_does() {
    let path =
        std::env::var_os("KDSCORE_TEMPLATE_CASES").expect("KDSCORE_TEMPLATE_CASES names the cases");
    let document = read(Path::new(&path));
    let started = Instant::now();
    let cases = compare(&document);
    cases.print();
    let templates = document["templates"].as_array().unwrap();
    let chats = templates
        .first()
        .map_or(0, |t| t["chats"].as_array().unwrap().len());
    println!(
        "{} templates x {chats} chats in {:.1} s",
        templates.len(),
        started.elapsed().as_secs_f64()
    );
    for compared in [&cases.texts, &cases.spans, &cases.ids, &cases.masks] {
        assert!(compared.differ.is_empty(), "{}", compared.counts());
        assert!(
            compared.only_they_refuse.is_empty(),
            "{}",
            compared.counts()
        );
    }
    assert!(
        cases.texts.only_we_refuse.is_empty(),
        "{}",
        cases.texts.counts()
    );
}

#[test]
fn tokenizers_of_checkpoints_give_the_ids_that_transformers_does() {
    let path =
        std::env::var_os("KDSCORE_TEMPLATE_CASES").expect("KDSCORE_TEMPLATE_CASES names the cases");
    let document = read(Path::new(&path));
    let started = Instant::now();
    let compared = compare_checkpoints(&document);
    let checkpoints = document["checkpoints"].as_array().unwrap().len();
    println!(
        "{checkpoints} tokenizers in {:.1} s",
        started.elapsed().as_secs_f64()
    );
    expect_equal(&compared);
}
