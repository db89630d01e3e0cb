//! Weights on the device: matrices in the compute dtype, vectors in fp32.

use super::arena::Room;
use super::tensor::Kind;

/// A weight where the kernels read it.
#[derive(Debug)]
pub enum DeviceWeight {
    Matrix {
        room: Room,
        kind: Kind,
        outputs: usize, // N
        inputs: usize,  // K
    },
    Vector {
        room: Room,
        length: usize,
        /// The same rounded to bf16, for products that leave bf16.
        rounded: Option<Room>,
    },
}

impl DeviceWeight {
    /// Address, kind, outputs and inputs.
    ///
    /// # Panics
    /// A vector where the description has a matrix.
    pub fn matrix(&self) -> (u64, Kind, usize, usize) {
        match self {
            DeviceWeight::Matrix {
                room,
                kind,
                outputs,
                inputs,
            } => (room.address(), *kind, *outputs, *inputs),
            DeviceWeight::Vector { .. } => panic!("expected a matrix, found a vector"),
        }
    }

    /// Address and length.
    ///
    /// # Panics
    /// A matrix where the description has a vector.
    pub fn vector(&self) -> (u64, usize) {
        match self {
            DeviceWeight::Vector { room, length, .. } => (room.address(), *length),
            DeviceWeight::Matrix { .. } => panic!("expected a vector, found a matrix"),
        }
    }

    /// Address of a vector in `kind`.
    ///
    /// # Panics
    /// As for `vector`, and bf16 in an fp32 run.
    pub fn vector_in(&self, kind: Kind) -> u64 {
        match (self, kind) {
            (
                DeviceWeight::Vector {
                    rounded: Some(rounded),
                    ..
                },
                Kind::Bf16,
            ) => rounded.address(),
            (_, Kind::F32) => self.vector().0,
            _ => panic!("expected a vector in {kind:?}, found none"),
        }
    }
}
