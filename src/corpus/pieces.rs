//! Encodings of pieces that come again: system prompts, tool schemas, short answers, turn ends.
//!
//! A rendered chat is cut before each control token. The tokenizer cuts it there itself, before it
//! normalises, splits or merges anything, so the tokens of the pieces are the tokens of the whole,
//! and a piece that was seen before need not be encoded again.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use tokenizers::AddedToken;

use super::problem::RowResult;
use super::tokenizer::Encoded;

/// Threads rarely meet at one of as many.
const SHELVES: usize = 16;
/// Bytes a shelf may hold; a full one starts over.
const SHELF_BYTES: usize = 1 << 20;

/// Where texts may be cut, and the pieces seen lately.
#[derive(Debug)]
pub struct Pieces {
    cuts: Vec<String>,
    first: [bool; 256],
    shelves: [Mutex<Shelf>; SHELVES],
}

#[derive(Debug, Default)]
struct Shelf {
    known: HashMap<Box<str>, Encoded>,
    bytes: usize,
}

impl Pieces {
    pub fn new<'a>(added: impl Iterator<Item = &'a AddedToken>) -> Pieces {
        let added: Vec<&AddedToken> = added.filter(|t| !t.content.is_empty()).collect();
        let mut cuts: Vec<String> = Vec::new();
        // A token that asks what stands beside it would see the cut.
        if !added.iter().any(|t| t.single_word) {
            let is_cut = |t: &&&AddedToken| {
                let plain = t.special && !t.normalized && !t.lstrip && !t.rstrip;
                plain && !added.iter().any(|other| reaches_into(other, &t.content))
            };
            cuts.extend(added.iter().filter(is_cut).map(|t| t.content.clone()));
        }
        let mut first = [false; 256];
        for cut in &cuts {
            first[cut.as_bytes()[0] as usize] = true;
        }
        Pieces {
            cuts,
            first,
            shelves: Default::default(),
        }
    }

    /// What `encode` makes of `text`, from its pieces.
    ///
    /// # Errors
    /// What `encode` says of a piece.
    pub fn encoded(
        &self,
        text: &str,
        encode: impl Fn(&str) -> RowResult<Encoded>,
    ) -> RowResult<Encoded> {
        let spans = self.spans(text);
        if spans.len() < 2 {
            return encode(text);
        }
        let mut whole = Encoded::default();
        for span in spans {
            let piece = &text[span.clone()];
            let shelf = self.shelf(piece);
            let lock = || shelf.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = lock().known.get(piece) {
                whole.append(known, span.start);
                continue;
            }
            let found = encode(piece)?;
            whole.append(&found, span.start);
            lock().keep(piece, found);
        }
        Ok(whole)
    }

    fn shelf(&self, piece: &str) -> &Mutex<Shelf> {
        let mut hash = DefaultHasher::new();
        piece.hash(&mut hash);
        &self.shelves[hash.finish() as usize % SHELVES]
    }

    fn spans(&self, text: &str) -> Vec<Range<usize>> {
        let bytes = text.as_bytes();
        let (mut spans, mut start, mut at) = (Vec::new(), 0, 0);
        while at < bytes.len() {
            let cut = match self.first[bytes[at] as usize] {
                true => self
                    .cuts
                    .iter()
                    .find(|c| bytes[at..].starts_with(c.as_bytes())),
                false => None,
            };
            match cut {
                Some(cut) => {
                    if start < at {
                        spans.push(start..at);
                    }
                    start = at;
                    at += cut.len();
                }
                None => at += 1,
            }
        }
        spans.push(start..bytes.len());
        spans
    }
}

/// Whether `other` may be found over the start of `cut`, which is then no place to cut.
fn reaches_into(other: &AddedToken, cut: &str) -> bool {
    let other = other.content.as_bytes();
    (1..other.len()).any(|i| {
        let rest = &other[i..];
        rest.starts_with(cut.as_bytes()) || cut.as_bytes().starts_with(rest)
    })
}

impl Shelf {
    fn keep(&mut self, piece: &str, encoded: Encoded) {
        let per_token = size_of::<i32>() + size_of::<(usize, usize)>();
        let bytes = piece.len() + encoded.ids.len() * per_token;
        if bytes > SHELF_BYTES / 4 {
            return;
        }
        if self.bytes + bytes > SHELF_BYTES {
            *self = Shelf::default();
        }
        self.bytes += bytes;
        self.known.insert(piece.into(), encoded);
    }
}

impl Encoded {
    /// The tokens of a text that stands `at` bytes into this one's.
    fn append(&mut self, other: &Encoded, at: usize) {
        self.ids.extend(&other.ids);
        let offsets = other.offsets.iter();
        self.offsets
            .extend(offsets.map(|(start, end)| (start + at, end + at)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(content: &str) -> AddedToken {
        AddedToken::from(content, true)
    }

    /// The pieces of a text, by what stands in them.
    fn cut<'a>(added: &[AddedToken], text: &'a str) -> Vec<&'a str> {
        let pieces = Pieces::new(added.iter());
        pieces.spans(text).into_iter().map(|s| &text[s]).collect()
    }

    #[test]
    fn texts_are_cut_before_control_tokens() {
        let added = [token("<s>"), token("</s>")];
        assert_eq!(
            cut(&added, "<s>a</s>\n<s><s>é"),
            ["<s>a", "</s>\n", "<s>", "<s>é"]
        );
        assert_eq!(cut(&added, "x<s"), ["x<s"]);
        assert_eq!(cut(&added, "x<s>"), ["x", "<s>"]);
    }

    #[test]
    fn tokens_that_are_no_clean_cut_are_left_alone() {
        for (added, text) in [
            (vec![token("<s>").lstrip(true)], "a <s>b"),
            (vec![token("<s>").normalized(true)], "a<s>b"),
            (vec![token("<s>"), token("th").single_word(true)], "th<s>b"),
            (vec![token("<s>"), token("a<s")], "a<s>b"),
            (vec![token("<s>"), token("[<s>]")], "[<s>]"),
            (vec![token("aa")], "baaa"),
            (vec![AddedToken::from("<s>", false)], "a<s>b"),
        ] {
            assert_eq!(cut(&added, text), [text], "{added:?}");
        }
        // One that begins with it is no hindrance: the cut is before both.
        assert_eq!(
            cut(&[token("<s>"), token("<s>>")], "a<s>>b"),
            ["a", "<s>>b"]
        );
    }

    #[test]
    fn a_piece_is_encoded_once_and_a_full_shelf_starts_over() {
        let pieces = Pieces::new([token("<s>")].iter());
        let calls = std::cell::Cell::new(0);
        let encode = |text: &str| {
            calls.set(calls.get() + 1);
            let bytes = text.bytes().enumerate();
            let (ids, offsets) = bytes.map(|(i, b)| (i32::from(b), (i, i + 1))).unzip();
            Ok(Encoded { ids, offsets })
        };
        let whole = pieces.encoded("ab<s>c<s>c", encode).unwrap();
        assert_eq!(whole.offsets.last(), Some(&(9, 10)));
        assert_eq!(calls.get(), 2);
        for i in 0..40 * SHELVES {
            let text = format!("<s>{i}<s>{}", "x".repeat(5000));
            pieces.encoded(&text, encode).unwrap();
        }
        for shelf in &pieces.shelves {
            let shelf = shelf.lock().unwrap();
            assert!(shelf.bytes <= SHELF_BYTES && !shelf.known.is_empty());
        }
    }
}
