//! Buffers on the device.

use super::arena::Room;
use crate::backend::Tensor;

/// Rows that every product is called on, a whole number of times: other numbers of rows would
/// bring other kernels, and with them other bits.
pub const TILE: usize = 128;

/// The type of a buffer's numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    Bf16,
    F32,
}

impl Kind {
    /// As the kernels' names have it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Bf16 => "bf16",
            Kind::F32 => "f32",
        }
    }

    pub fn size(self) -> usize {
        match self {
            Kind::Bf16 => 2,
            Kind::F32 => 4,
        }
    }
}

/// Where (rows, width) numbers lie.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pub address: u64,
    pub kind: Kind,
    pub rows: usize,
    pub width: usize,
}

impl View {
    pub fn numbers(&self) -> usize {
        self.rows * self.width
    }

    pub fn bytes(&self) -> usize {
        self.numbers() * self.kind.size()
    }

    /// The same from a row on, with so many rows. More than are in use may be taken, up to the
    /// buffer's own.
    pub fn at_row(&self, first: usize, rows: usize) -> View {
        View {
            address: self.address + (first * self.width * self.kind.size()) as u64,
            rows,
            ..*self
        }
    }
}

/// (rows, width) in device memory. There is room for whole tiles of rows; those behind the last
/// row in use hold anything.
#[derive(Debug)]
pub struct DeviceTensor {
    room: Room,
    kind: Kind,
    numbers_max: usize,
    rows: usize,
    width: usize,
}

impl DeviceTensor {
    /// Numbers that a buffer of so many rows is made for.
    pub fn numbers(rows_max: usize, width: usize) -> Option<usize> {
        rows_max.checked_next_multiple_of(TILE)?.checked_mul(width)
    }

    /// `room` holds [`DeviceTensor::numbers`] of `kind`.
    pub fn new(room: Room, kind: Kind, rows_max: usize, width: usize) -> DeviceTensor {
        DeviceTensor {
            room,
            kind,
            numbers_max: DeviceTensor::numbers(rows_max, width).unwrap_or(0),
            rows: rows_max,
            width,
        }
    }

    pub fn view(&self) -> View {
        View {
            address: self.room.address(),
            kind: self.kind,
            rows: self.rows,
            width: self.width,
        }
    }

    /// Rows of the width at hand that there is room for, in whole tiles.
    pub fn rows_max(&self) -> usize {
        let rows = self.numbers_max.checked_div(self.width).unwrap_or(0);
        rows - rows % TILE
    }
}

impl Tensor for DeviceTensor {
    fn rows(&self) -> usize {
        self.rows
    }

    fn width(&self) -> usize {
        self.width
    }

    fn set_shape(&mut self, rows: usize, width: usize) {
        assert!(
            DeviceTensor::numbers(rows, width).is_some_and(|n| n <= self.numbers_max),
            "a buffer of {} numbers can't hold {rows} x {width} in whole tiles",
            self.numbers_max
        );
        (self.rows, self.width) = (rows, width);
    }
}
