//! Token ids as text a person can read, byte by byte.

use std::path::Path;

use anyhow::Result;

use super::tokenizer::TextTokenizer;

/// How a vocabulary writes text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Writing {
    /// Every byte is a printable character (GPT-2, Llama 3, Qwen).
    ByteLevel,
    /// `▁` is a space and `<0xE2>` a byte (SentencePiece: Llama 2, Gemma).
    SentencePiece,
    /// Words, with a prefix on parts inside a word (BERT).
    Words,
}

/// Shows tokens by looking them up one at a time, so a token that is half a character is shown
/// as the bytes it is.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: TextTokenizer,
    writing: Writing,
}

impl Decoder {
    /// Reads the tokenizer of a checkpoint or corpus folder.
    ///
    /// # Errors
    /// A missing or broken tokenizer.
    pub fn load(folder: &Path) -> Result<Decoder> {
        Ok(Decoder::new(TextTokenizer::load(folder)?))
    }

    pub fn new(tokenizer: TextTokenizer) -> Decoder {
        let writing = tokenizer.writing();
        Decoder { tokenizer, writing }
    }

    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// One token, displayable: control characters and incomplete bytes escaped.
    pub fn piece(&self, id: i32) -> String {
        self.text(&[id])
    }

    /// Tokens in a row, displayable. Bytes that make a character only together are joined.
    pub fn text(&self, ids: &[i32]) -> String {
        let mut bytes = Vec::new();
        let mut shown = String::new();
        for &id in ids {
            match self.tokenizer.token(id) {
                None => {
                    show(&mut bytes, &mut shown);
                    shown.push_str(&format!("⟨id {id}⟩"));
                }
                Some(token) if self.tokenizer.is_added(id) => {
                    show(&mut bytes, &mut shown);
                    bytes.extend(token.as_bytes());
                    show(&mut bytes, &mut shown);
                }
                Some(token) => self.append(&token, &mut bytes),
            }
        }
        show(&mut bytes, &mut shown);
        shown
    }

    fn append(&self, token: &str, bytes: &mut Vec<u8>) {
        match self.writing {
            Writing::ByteLevel => match token.chars().map(byte_of).collect::<Option<Vec<u8>>>() {
                Some(found) => bytes.extend(found),
                None => bytes.extend(token.as_bytes()),
            },
            Writing::SentencePiece => match fallback_byte(token) {
                Some(byte) => bytes.push(byte),
                None => bytes.extend(token.replace('▁', " ").as_bytes()),
            },
            Writing::Words => match token.strip_prefix("##") {
                Some(inside) if !bytes.is_empty() => bytes.extend(inside.as_bytes()),
                _ => {
                    if !bytes.is_empty() {
                        bytes.push(b' ');
                    }
                    bytes.extend(token.as_bytes());
                }
            },
        }
    }
}

impl TextTokenizer {
    /// By the vocabulary itself, which tells it more reliably than the decoder's settings do.
    fn writing(&self) -> Writing {
        let has = |token: &str| self.id(token).is_some();
        if has("<0x0A>") || has("▁") || has("▁the") {
            Writing::SentencePiece
        } else if has("Ġ") || has("Ċ") || has("Ġthe") || has("Ã") {
            Writing::ByteLevel
        } else {
            Writing::Words
        }
    }
}

/// The byte a character stands for in a byte-level vocabulary: itself where it is printable,
/// else one of the characters from U+0100 on, in the order of the bytes.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let code = c as u32;
    if is_printable(code) {
        return Some(code as u8);
    }
    let nth = code.checked_sub(0x100)? as usize;
    (0..=255_u8)
        .filter(|&b| !is_printable(u32::from(b)))
        .nth(nth)
}

fn is_printable(code: u32) -> bool {
    matches!(code, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// `<0xE2>`
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then_some(())?;
    u8::from_str_radix(digits, 16).ok()
}

/// Moves `bytes` to `shown`, whole characters as they are and other bytes in hex.
fn show(bytes: &mut Vec<u8>, shown: &mut String) {
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\n' => shown.push('↵'),
                '\t' => shown.push('⇥'),
                '\r' => shown.push('␍'),
                c if c.is_control() || is_invisible(c) => {
                    shown.push_str(&format!("⟨u+{:04x}⟩", c as u32));
                }
                c => shown.push(c),
            }
        }
        for byte in chunk.invalid() {
            shown.push_str(&format!("⟨{byte:02x}⟩"));
        }
    }
    bytes.clear();
}

/// Characters that would change how a table prints without being seen.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_character() {
        let alphabet: Vec<char> = (0..0x144)
            .filter_map(char::from_u32)
            .filter(|&c| byte_of(c).is_some())
            .collect();
        let mut bytes: Vec<u8> = alphabet.iter().filter_map(|&c| byte_of(c)).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of('东'), None);
    }

    #[test]
    fn bytes_are_shown_as_what_they_are() {
        let says = |bytes: &[u8]| {
            let mut shown = String::new();
            show(&mut bytes.to_vec(), &mut shown);
            shown
        };
        assert_eq!(
            says("a\n\tb é\u{7f}\u{200b}".as_bytes()),
            "a↵⇥b é⟨u+007f⟩⟨u+200b⟩"
        );
        assert_eq!(says(&[0xc3]), "⟨c3⟩");
        assert_eq!(says(&[b'x', 0xe2, 0x82, 0xac, 0xe2, 0x82]), "x€⟨e2⟩⟨82⟩");
    }

    /// A decoder over a small vocabulary of the given kind.
    fn decoder(tokenizer: &str) -> Decoder {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
        Decoder::load(folder.path()).unwrap()
    }

    #[test]
    fn half_characters_of_a_byte_level_vocabulary_are_shown_as_bytes() {
        let teacher = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/teacher");
        let decoder = Decoder::load(Path::new(teacher)).unwrap();
        let text = "x 🙂\n";
        let ids = decoder.tokenizer().encode_rendered(text).unwrap().ids;
        assert_eq!(decoder.text(&ids), "x 🙂↵");
        let pieces: Vec<_> = ids.iter().map(|&id| decoder.piece(id)).collect();
        assert!(
            pieces.concat().contains("⟨f0⟩") || pieces.concat().contains("⟨9f⟩"),
            "{pieces:?}"
        );
        assert_eq!(
            decoder.text(&[0, 2, 999_999, -1]),
            "<|bos|><|im_end|>⟨id 999999⟩⟨id -1⟩"
        );
    }

    #[test]
    fn sentencepiece_bytes_and_spaces_are_decoded() {
        let decoder = decoder(
            r#"{"version":"1.0","added_tokens":[{"id":7,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
                "normalizer":{"type":"Replace","pattern":{"String":" "},"content":"▁"},"pre_tokenizer":null,"post_processor":null,"decoder":null,
                "model":{"type":"BPE","byte_fallback":true,"unk_token":"<unk>","fuse_unk":true,
                "vocab":{"<unk>":0,"<0xE2>":1,"<0x82>":2,"<0xAC>":3,"▁":4,"a":5,"▁a":6},"merges":["▁ a"]}}"#,
        );
        let encoded = decoder.tokenizer().encode_rendered("a a€").unwrap();
        assert_eq!(encoded.ids, [5, 6, 1, 2, 3]);
        // Tokens that share a character share its bytes.
        assert_eq!(encoded.offsets, [(0, 1), (1, 3), (3, 6), (3, 6), (3, 6)]);
        assert_eq!(decoder.text(&encoded.ids), "a a€");
        assert_eq!(decoder.piece(1), "⟨e2⟩");
        assert_eq!(decoder.piece(6), " a");
        assert_eq!(decoder.text(&[7, 6]), "<s> a");
    }

    #[test]
    fn parts_of_words_are_joined() {
        let decoder = decoder(
            r###"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
                "model":{"type":"WordPiece","unk_token":"[UNK]","continuing_subword_prefix":"##","max_input_chars_per_word":100,
                "vocab":{"[UNK]":0,"play":1,"##ing":2,"now":3}}}"###,
        );
        assert_eq!(decoder.text(&[1, 2, 3]), "playing now");
        assert_eq!(decoder.piece(2), "##ing");
    }

    #[test]
    fn fallback_bytes_are_read() {
        assert_eq!(fallback_byte("<0xE2>"), Some(0xe2));
        assert_eq!(fallback_byte("<0xE>"), None);
        assert_eq!(fallback_byte("<pad>"), None);
    }
}
