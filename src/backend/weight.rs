//! A weight in host memory: bytes of a mapped file, and how numbers are read from them.
//!
//! A weight is used as a matrix of rows. What is stored may be laid out otherwise: fused with
//! other weights, transposed, or quantised. None of that is undone ahead of time; a row is decoded
//! when it is used, so that the bytes stay in the file.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use half::f16;

/// How a plain weight encodes its numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FloatDtype {
    F32,
    F16,
    Bf16,
}

impl FloatDtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            FloatDtype::F32 => 4,
            FloatDtype::F16 | FloatDtype::Bf16 => 2,
        }
    }
}

/// How the bytes of a stored line become numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Encoding {
    Float(FloatDtype),
    /// float8_e4m3fn; every block of `block` lines and `block` columns has an f32 factor.
    Fp8Blocks {
        block: usize,
    },
    /// OCP microscaling fp4 (MX specification 1.0): two e2m1 numbers a byte, the low nibble
    /// first; every [`MX_BLOCK`] columns share a power of two, stored as its exponent + 127.
    Mxfp4,
}

/// Columns that share a scale in a microscaling format.
pub const MX_BLOCK: usize = 32;

/// The numbers of e2m1, by nibble.
const FP4: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The numbers of float8_e4m3fn, by byte: 1 sign, 4 exponent and 3 mantissa bits, bias 7, no
/// infinity; 0x7f and 0xff are NaN (OCP 8-bit floating point specification 1.0).
static FP8: LazyLock<[f32; 256]> = LazyLock::new(|| {
    std::array::from_fn(|byte| {
        let (exponent, mantissa) = ((byte >> 3) & 15, (byte & 7) as f32);
        let magnitude = match exponent {
            15 if byte & 7 == 7 => f32::NAN,
            0 => mantissa * 2f32.powi(-9),
            _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent as i32 - 7),
        };
        if byte & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        }
    })
});

impl Encoding {
    /// Bytes of a line of `columns` numbers.
    pub fn line_bytes(self, columns: usize) -> usize {
        match self {
            Encoding::Float(dtype) => columns * dtype.size(),
            Encoding::Fp8Blocks { .. } => columns,
            Encoding::Mxfp4 => columns / 2,
        }
    }

    /// Bytes of the scales of `lines` lines of `columns` numbers.
    pub fn scale_bytes(self, lines: usize, columns: usize) -> usize {
        match self {
            Encoding::Float(_) => 0,
            Encoding::Fp8Blocks { block } => lines.div_ceil(block) * columns.div_ceil(block) * 4,
            Encoding::Mxfp4 => lines * columns / MX_BLOCK,
        }
    }
}

/// Which stored line a row is: `start + row / group * step + row % group`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lines {
    pub start: usize,
    /// Rows that lie side by side.
    pub group: usize,
    /// Lines from one group to the next.
    pub step: usize,
}

impl Lines {
    /// Row n is line n.
    pub const ALL: Lines = Lines::from(0);

    /// Row n is line `start` + n.
    pub const fn from(start: usize) -> Lines {
        Lines {
            start,
            group: usize::MAX,
            step: 0,
        }
    }

    pub fn of(&self, row: usize) -> usize {
        self.start + row / self.group * self.step + row % self.group
    }
}

/// Whether a row of the weight is a line of what is stored, or a column of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    Lines,
    Columns,
}

/// A span of a buffer that others share.
#[derive(Clone)]
pub struct HostBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    span: Range<usize>,
}

impl HostBytes {
    /// # Panics
    /// When `span` is outside the owner's bytes; the caller has checked the file.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, span: Range<usize>) -> HostBytes {
        assert!(span.start <= span.end && span.end <= (*owner).as_ref().len());
        HostBytes { owner, span }
    }

    pub fn get(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.span.clone()]
    }

    /// Part `index` of `of` equal ones.
    pub fn part(&self, index: usize, of: usize) -> HostBytes {
        let each = self.span.len() / of;
        let start = self.span.start + index * each;
        HostBytes::new(self.owner.clone(), start..start + each)
    }
}

/// A weight, usually a piece of a memory-mapped file; cheap to clone.
#[derive(Clone)]
pub struct HostWeight {
    bytes: HostBytes,
    scales: Option<HostBytes>,
    pub encoding: Encoding,
    /// Stored lines are this many numbers long.
    columns: usize,
    lines: Lines,
    order: Order,
    /// First row, of those `lines` and `order` speak of.
    first: usize,
    /// (N) or (N, K), as it is used.
    pub shape: Vec<usize>,
}

impl HostWeight {
    /// All of what is stored: `columns` numbers a line, used as `shape`.
    ///
    /// # Panics
    /// When the bytes are not exactly as many as `shape` needs; the caller has checked the file.
    pub fn stored(
        bytes: HostBytes,
        scales: Option<HostBytes>,
        encoding: Encoding,
        shape: Vec<usize>,
    ) -> HostWeight {
        let columns: usize = shape[1..].iter().product();
        assert_eq!(bytes.span.len(), shape[0] * encoding.line_bytes(columns));
        let scale_bytes = scales.as_ref().map_or(0, |s| s.span.len());
        assert_eq!(scale_bytes, encoding.scale_bytes(shape[0], columns));
        HostWeight {
            bytes,
            scales,
            encoding,
            columns,
            lines: Lines::ALL,
            order: Order::Lines,
            first: 0,
            shape,
        }
    }

    /// A weight made of numbers at hand, kept as f32.
    pub fn from_f32(values: &[f32], shape: Vec<usize>) -> HostWeight {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let span = 0..bytes.len();
        let bytes = HostBytes::new(Arc::new(bytes), span);
        HostWeight::stored(bytes, None, Encoding::Float(FloatDtype::F32), shape)
    }

    /// A weight of zeros, of which one line is kept: for a description without its checkpoint.
    pub fn zeros(shape: Vec<usize>) -> HostWeight {
        let columns: usize = shape[1..].iter().product();
        let one = HostWeight::from_f32(&vec![0.0; columns], vec![1, columns]);
        let always_the_first = Lines {
            start: 0,
            group: 1,
            step: 0,
        };
        one.used_as(always_the_first, Order::Lines, shape)
    }

    /// The same bytes, read as rows in another way.
    ///
    /// # Panics
    /// When a row of `shape` would lie outside what is stored.
    pub fn used_as(mut self, lines: Lines, order: Order, shape: Vec<usize>) -> HostWeight {
        let (stored_lines, columns) = (self.shape[0], self.columns);
        let (along, across) = match order {
            Order::Lines => (stored_lines, columns),
            Order::Columns => (columns, stored_lines),
        };
        assert!(
            lines.of(shape[0] - 1) < along,
            "a row beyond what is stored"
        );
        assert_eq!(shape[1..].iter().product::<usize>(), across);
        assert!(order == Order::Lines || matches!(self.encoding, Encoding::Float(_)));
        (self.lines, self.order, self.shape) = (lines, order, shape);
        self
    }

    /// Rows of a matrix, or the length of a vector.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row.
    pub fn width(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Rows `rows` of this weight, sharing its memory.
    pub fn slice_rows(&self, rows: Range<usize>) -> HostWeight {
        let mut part = self.clone();
        part.first += rows.start;
        part.shape[0] = rows.len();
        part
    }

    /// Every number, as f32.
    pub fn values(&self) -> Vec<f32> {
        let width = self.width();
        let mut out = vec![0.0; self.rows() * width];
        for (row, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
            self.read(row, 0, out);
        }
        out
    }

    /// Numbers `from`.. of a row, as many as fit `out`.
    #[inline(always)]
    pub fn read(&self, row: usize, from: usize, out: &mut [f32]) {
        match self.encoding {
            Encoding::Float(FloatDtype::F32) => self.read_f32(row, from, out),
            Encoding::Float(FloatDtype::F16) => self.read_f16(row, from, out),
            Encoding::Float(FloatDtype::Bf16) => self.read_bf16(row, from, out),
            Encoding::Fp8Blocks { block } => self.read_fp8(self.line(row), from, block, out),
            Encoding::Mxfp4 => self.read_mxfp4(self.line(row), from, out),
        }
    }

    /// `read`, of a weight that is known to be f32.
    #[inline(always)]
    pub fn read_f32(&self, row: usize, from: usize, out: &mut [f32]) {
        self.read_floats(self.line(row), from, out, f32::from_le_bytes);
    }

    /// `read`, of a weight that is known to be f16.
    #[inline(always)]
    pub fn read_f16(&self, row: usize, from: usize, out: &mut [f32]) {
        self.read_floats(self.line(row), from, out, |b| {
            f16::from_le_bytes(b).to_f32()
        });
    }

    /// `read`, of a weight that is known to be bf16, which is the upper half of an f32.
    #[inline(always)]
    pub fn read_bf16(&self, row: usize, from: usize, out: &mut [f32]) {
        self.read_floats(self.line(row), from, out, |b| {
            f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
        });
    }

    #[inline(always)]
    fn line(&self, row: usize) -> usize {
        self.lines.of(self.first + row)
    }

    #[inline(always)]
    fn read_floats<const SIZE: usize>(
        &self,
        line: usize,
        from: usize,
        out: &mut [f32],
        widen: impl Fn([u8; SIZE]) -> f32,
    ) {
        let (elements, _) = self.bytes.get().as_chunks::<SIZE>();
        match self.order {
            Order::Lines => {
                let at = line * self.columns + from;
                let source = &elements[at..at + out.len()];
                out.iter_mut().zip(source).for_each(|(o, &b)| *o = widen(b));
            }
            Order::Columns => {
                let column = elements[from * self.columns + line..].iter();
                let source = column.step_by(self.columns);
                out.iter_mut().zip(source).for_each(|(o, &b)| *o = widen(b));
            }
        }
    }

    fn read_fp8(&self, line: usize, from: usize, block: usize, out: &mut [f32]) {
        let at = line * self.columns + from;
        let source = &self.bytes.get()[at..at + out.len()];
        let (factors, _) = self.scale_bytes().as_chunks::<4>();
        let factors = &factors[line / block * self.columns.div_ceil(block)..];
        for ((o, &byte), column) in out.iter_mut().zip(source).zip(from..) {
            let factor = f32::from_le_bytes(factors[column / block]);
            *o = FP8[byte as usize] * factor;
        }
    }

    fn read_mxfp4(&self, line: usize, from: usize, out: &mut [f32]) {
        let at = line * self.columns + from;
        let (bytes, scales) = (self.bytes.get(), self.scale_bytes());
        let mut column = at;
        let mut rest = out;
        while !rest.is_empty() {
            // What is left of the block that shares a scale.
            let count = (MX_BLOCK - column % MX_BLOCK).min(rest.len());
            let (block, after) = rest.split_at_mut(count);
            let factor = power_of_two(scales[column / MX_BLOCK]);
            for (o, column) in block.iter_mut().zip(column..) {
                let nibble = bytes[column / 2] >> (4 * (column % 2)) & 15;
                *o = FP4[nibble as usize] * factor;
            }
            column += count;
            rest = after;
        }
    }

    fn scale_bytes(&self) -> &[u8] {
        self.scales.as_ref().map_or(&[], HostBytes::get)
    }
}

/// 2^(exponent - 127); 255 is NaN (OCP MX specification 1.0, E8M0).
fn power_of_two(exponent: u8) -> f32 {
    match exponent {
        0 => f32::from_bits(1 << 22), // 2^-127 is below the normal numbers
        255 => f32::NAN,
        e => f32::from_bits(u32::from(e) << 23),
    }
}

impl fmt::Debug for HostWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostWeight({:?} {:?})", self.encoding, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: Vec<u8>) -> HostBytes {
        let span = 0..values.len();
        HostBytes::new(Arc::new(values), span)
    }

    #[test]
    fn fused_and_transposed_weights_are_read_in_place() {
        let values: Vec<f32> = (0..24).map(|v| v as f32).collect();
        let stored = HostWeight::from_f32(&values, vec![6, 4]);
        let pairs = Lines {
            start: 1,
            group: 1,
            step: 2,
        };
        let odd = stored.clone().used_as(pairs, Order::Lines, vec![3, 4]);
        assert_eq!(
            odd.values()[..8],
            [4.0, 5.0, 6.0, 7.0, 12.0, 13.0, 14.0, 15.0]
        );
        assert_eq!(odd.slice_rows(2..3).values(), [20.0, 21.0, 22.0, 23.0]);
        let turned = stored.used_as(Lines::from(2), Order::Columns, vec![2, 6]);
        assert_eq!(turned.values()[..6], [2.0, 6.0, 10.0, 14.0, 18.0, 22.0]);
        assert_eq!(turned.slice_rows(1..2).values()[0], 3.0);
    }

    #[test]
    fn fp8_has_the_numbers_of_the_specification() {
        assert_eq!(
            (FP8[0x7e], FP8[0x01], FP8[0x08]),
            (448.0, 2f32.powi(-9), 2f32.powi(-6))
        );
        assert_eq!((FP8[0xb8], FP8[0x38]), (-1.0, 1.0));
        assert!(FP8[0x7f].is_nan() && FP8[0xff].is_nan());
        let scales: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        let weight = HostWeight::stored(
            bytes(vec![0x38; 9]),
            Some(bytes(scales)),
            Encoding::Fp8Blocks { block: 2 },
            vec![3, 3],
        );
        assert_eq!(
            weight.values(),
            [1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0]
        );
    }

    #[test]
    fn mxfp4_takes_the_low_nibble_first() {
        let mut codes = vec![0u8; 16];
        codes[0] = 0x7a; // low 0xa: -1, high 0x7: 6
        let weight = HostWeight::stored(
            bytes(codes),
            Some(bytes(vec![128])),
            Encoding::Mxfp4,
            vec![1, 32],
        );
        assert_eq!(weight.values()[..3], [-2.0, 12.0, 0.0]);
        assert_eq!(power_of_two(127), 1.0);
        assert_eq!(f64::from(power_of_two(0)), 2f64.powi(-127));
    }
}
