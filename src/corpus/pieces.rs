//! Encodings of pieces that come again: system prompts, tool schemas, documents asked about.
//!
//! A rendered chat may be cut before each control token. The tokenizer cuts it there itself, before
//! it normalises, splits or merges anything, so the tokens of the pieces are the tokens of the whole,
//! and a piece that was seen before need not be encoded again.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use tokenizers::AddedToken;

use super::problem::RowResult;
use super::tokenizer::Encoded;

/// Threads rarely meet at one of as many.
const SHELVES: usize = 16;
/// Bytes a shelf may hold; a full one starts over.
const SHELF_BYTES: usize = 1 << 20;
/// Shorter pieces are encoded with their neighbours, which costs less than to look them up.
const PIECE_BYTES_MIN: usize = 128;

/// Where texts may be cut, and the pieces seen lately.
#[derive(Debug)]
pub struct Pieces {
    cuts: Vec<String>,
    first: [bool; 256],
    shelves: [Mutex<Shelf>; SHELVES],
}

#[derive(Debug, Default)]
struct Shelf {
    /// Hashes of pieces that came once: most never come again, and aren't worth keeping.
    met: HashSet<u64>,
    known: HashMap<Box<str>, Arc<Encoded>>,
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
        let mut whole = Encoded::default();
        let mut done = 0;
        for span in self.spans(text) {
            let Some(known) = self.known(&text[span.clone()], &encode)? else {
                continue;
            };
            if done < span.start {
                whole.append(&encode(&text[done..span.start])?, done);
            }
            whole.append(&known, span.start);
            done = span.end;
        }
        if done == 0 {
            return encode(text);
        }
        if done < text.len() {
            whole.append(&encode(&text[done..])?, done);
        }
        Ok(whole)
    }

    /// The tokens of a piece that comes at least the second time.
    fn known(
        &self,
        piece: &str,
        encode: impl Fn(&str) -> RowResult<Encoded>,
    ) -> RowResult<Option<Arc<Encoded>>> {
        if piece.len() < PIECE_BYTES_MIN {
            return Ok(None);
        }
        let mut hash = DefaultHasher::new();
        piece.hash(&mut hash);
        let hash = hash.finish();
        let shelf = &self.shelves[hash as usize % SHELVES];
        let lock = || shelf.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut shelf = lock();
            if let Some(known) = shelf.known.get(piece) {
                return Ok(Some(known.clone()));
            }
            if shelf.met.insert(hash) {
                shelf.grow(size_of::<u64>());
                return Ok(None);
            }
        }
        let found = Arc::new(encode(piece)?);
        lock().keep(piece, found.clone());
        Ok(Some(found))
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
    fn keep(&mut self, piece: &str, encoded: Arc<Encoded>) {
        let per_token = size_of::<i32>() + size_of::<(usize, usize)>();
        let bytes = piece.len() + encoded.ids.len() * per_token;
        if bytes < SHELF_BYTES / 4 {
            self.grow(bytes);
            self.known.insert(piece.into(), encoded);
        }
    }

    fn grow(&mut self, bytes: usize) {
        if self.bytes + bytes > SHELF_BYTES {
            *self = Shelf::default();
        }
        self.bytes += bytes;
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
    fn a_piece_that_comes_again_is_encoded_alone_and_once() {
        let pieces = Pieces::new([token("<s>")].iter());
        let texts = std::cell::RefCell::new(Vec::new());
        let encode = |text: &str| {
            texts.borrow_mut().push(text.len());
            let bytes = text.bytes().enumerate();
            let (ids, offsets) = bytes.map(|(i, b)| (i32::from(b), (i, i + 1))).unzip();
            Ok(Encoded { ids, offsets })
        };
        let prompt = format!("<s>{}", "x".repeat(PIECE_BYTES_MIN));
        for (text, calls) in [
            (format!("{prompt}<s>a"), vec![prompt.len() + 4]),
            (format!("a{prompt}<s>bc"), vec![prompt.len(), 1, 5]),
            (format!("{prompt}<s>bc<s>d"), vec![9]),
            (prompt.clone(), vec![]),
            ("<s>bc<s>bc".to_owned(), vec![10]),
        ] {
            assert_eq!(
                pieces.encoded(&text, encode).unwrap(),
                encode(&text).unwrap()
            );
            let found = std::mem::take(&mut *texts.borrow_mut());
            assert_eq!(found[..found.len() - 1], calls, "{text}");
        }
    }

    #[test]
    fn a_full_shelf_starts_over() {
        let pieces = Pieces::new([token("<s>")].iter());
        let encode = |text: &str| {
            let ids = vec![0; text.len()];
            let offsets = vec![(0, 1); text.len()];
            Ok(Encoded { ids, offsets })
        };
        for i in 0..40 * SHELVES {
            let text = format!("<s>{i}{}", "x".repeat(4000));
            for _ in 0..2 {
                pieces.encoded(&text, encode).unwrap();
            }
        }
        for shelf in &pieces.shelves {
            let shelf = shelf.lock().unwrap();
            assert!(shelf.bytes <= SHELF_BYTES && !shelf.known.is_empty());
        }
    }
}
