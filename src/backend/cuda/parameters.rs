//! Structs that kernels take, as their files in `cuda/` declare them.

use super::driver::Argument;
use crate::backend::Activation;

/// Activation of activation.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceActivation {
    pub kind: i32,
    pub alpha: f32,
    pub limit: f32,
}
// SAFETY: Activation of activation.cu.
unsafe impl Argument for DeviceActivation {}

impl From<Activation> for DeviceActivation {
    fn from(activation: Activation) -> DeviceActivation {
        let kind = match activation {
            Activation::Silu => 0,
            Activation::Gelu => 1,
            Activation::GeluTanh => 2,
            Activation::Relu => 3,
            Activation::Relu2 => 4,
            Activation::ClampedSwiglu { .. } => 5,
        };
        let (alpha, limit) = match activation {
            Activation::ClampedSwiglu { alpha, limit } => (alpha, limit),
            _ => (0.0, 0.0),
        };
        DeviceActivation { kind, alpha, limit }
    }
}

/// NormShape of norm.cu.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeviceNorm {
    pub width: i32,
    pub pieces: i32,
    pub count: i32,
    pub weight_step: i32,
    pub bias_step: i32,
    pub eps: f32,
}
// SAFETY: NormShape of norm.cu.
unsafe impl Argument for DeviceNorm {}

/// RopeShape of rope.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceRope {
    pub heads: i32,
    pub head_dim: i32,
    pub start: i32,
    pub half: i32,
}
// SAFETY: RopeShape of rope.cu.
unsafe impl Argument for DeviceRope {}

/// LinearShape of matmul.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceLinear {
    pub m: i32,
    pub n: i32,
    pub k: i32,
    pub adds: i32,
}
// SAFETY: LinearShape of matmul.cu.
unsafe impl Argument for DeviceLinear {}

/// LogitRule of head.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceLogitRule {
    pub width: i32,
    pub vocab: i32,
    pub vocab_real: i32,
    pub scale: f32,
    pub cap: f32,
    pub k: i32,
}
// SAFETY: LogitRule of head.cu.
unsafe impl Argument for DeviceLogitRule {}

/// Where the products of rows lie; HeadRows of head.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows {
    pub ids: u64,
    pub logp: u64,
    pub tail: u64,
    pub target_logp: u64,
    pub target_rank: u64,
    pub logsumexp: u64,
    pub entropy: u64,
    pub padded_mass: u64,
    pub bad: u64,
}
// SAFETY: nine pointers, as in head.cu.
unsafe impl Argument for DeviceRows {}
