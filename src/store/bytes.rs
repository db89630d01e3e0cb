//! The bytes of a stored file, mapped or owned, and typed views of them. All of the store's
//! `unsafe` is here.

use std::fs::File;
use std::io;
use std::ops::Deref;

use half::f16;
use memmap2::Mmap;

use crate::mapped;

const _: () = assert!(
    cfg!(target_endian = "little"),
    "arrays are little endian on disk and are viewed as they lie there"
);

/// A whole file: mapped where the disk can, or read into memory. Either way it starts at an
/// address that suits every element type.
#[derive(Debug)]
pub struct Bytes(Held);

#[derive(Debug)]
enum Held {
    Mapped(Mmap),
    Owned { words: Vec<u64>, len: usize },
}

impl Bytes {
    /// Maps `file`; what is written to it later by others shows through, so stored files are
    /// only ever replaced, never changed in place.
    pub fn map(file: &File) -> io::Result<Bytes> {
        if file.metadata()?.len() == 0 {
            return Ok(Bytes::owned(&[]));
        }
        Ok(Bytes(Held::Mapped(mapped::map(file)?)))
    }

    /// A copy of `bytes`.
    pub fn owned(bytes: &[u8]) -> Bytes {
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        Bytes(Held::Owned {
            words: words.collect(),
            len: bytes.len(),
        })
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Held::Mapped(map) => map,
            Held::Owned { words, len } => &as_bytes(words)[..*len],
        }
    }
}

/// Numbers whose every bit pattern is a value and that hold no padding.
pub trait Plain: Copy + private::Sealed {}

mod private {
    pub trait Sealed {}
}

macro_rules! plain {
    ($($t:ty),*) => { $(impl private::Sealed for $t {} impl Plain for $t {})* };
}

plain!(u8, i32, i64, u64, f16, f32);

/// The memory of `values`.
pub fn as_bytes<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: a plain type has no padding, so all of the slice's bytes are initialised; u8 has
    // no alignment to keep, and the length is that of the same memory.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// `bytes` as elements of `T`; `None` when they are not a whole number of them, or lie at an
/// address that does not suit `T`.
pub fn cast<T: Plain>(bytes: &[u8]) -> Option<&[T]> {
    // SAFETY: every bit pattern of a plain type is a value.
    let (before, values, after) = unsafe { bytes.align_to::<T>() };
    (before.is_empty() && after.is_empty()).then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owned_bytes_keep_their_length_and_their_alignment() {
        for len in 0..20 {
            let data: Vec<u8> = (0..len).collect();
            let bytes = Bytes::owned(&data);
            assert_eq!(&*bytes, data);
            assert_eq!(bytes.as_ptr() as usize % 8, 0);
        }
    }

    #[test]
    fn a_cast_needs_whole_elements() {
        let bytes = Bytes::owned(&[1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(cast::<i32>(&bytes), Some(&[1, 2][..]));
        assert_eq!(cast::<i32>(&bytes[..7]), None);
        assert_eq!(cast::<i32>(&bytes[1..5]), None);
        assert_eq!(cast::<i64>(&[]).map(<[i64]>::len), Some(0));
    }
}
