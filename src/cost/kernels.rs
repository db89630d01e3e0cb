//! What a batch should take on a device, from the bytes and FLOPs of its kernels: a roofline.
//!
//! The peaks are the makers' (`gpu`). What share of them kernels of each sort reach is assumed,
//! from what others have published; nothing here was measured.

use crate::backend::observed::OpClass;
use crate::backend::priced::{Cost, Costs, Engine, KernelUse};
use crate::gpu::Gpu;

/// Shares of a device's peaks that are assumed to be reached.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Reach {
    /// Of the products' peak by cuBLASLt: bf16 products of 748 to 791 of 989 TFLOP/s are reported
    /// on an H200 (linkedin/Liger-Kernel#1422).
    pub library: f64,
    /// Of the products' peak by kernels with mma.sync, masked parts counted as work: on an H100,
    /// 191 useful TFLOP/s at 512 tokens and 335 at 16,384 are published for FlashAttention-2
    /// (arXiv:2407.08608), of which 80 % and nearly all of the computed area are useful; on an
    /// A100, 50 to 73 % of 312 (arXiv:2307.08691).
    pub own: f64,
    /// Of the memory's bandwidth by kernels that read and write each number once.
    pub memory: f64,
}

/// Since Hopper tensor cores give their peak to instructions that mma.sync is not.
const BEFORE_HOPPER: Reach = Reach {
    library: 0.80,
    own: 0.55,
    memory: 0.88,
};
const HOPPER: Reach = Reach {
    library: 0.80,
    own: 0.25,
    memory: 0.90,
};

/// Between the ends of two kernels that follow one another, at least.
const LAUNCH_SECONDS: f64 = 3e-6;

/// A device and what is assumed of it.
#[derive(Clone, Copy, Debug)]
pub struct Roof {
    pub gpu: &'static Gpu,
    pub reach: Reach,
    pub peak_flops: f64,
}

impl Roof {
    fn of(name: &str, reach: Reach) -> Option<Roof> {
        let gpu = Gpu::find(name)?;
        let peak_flops = gpu.bf16_tflops? * 1e12;
        Some(Roof {
            gpu,
            reach,
            peak_flops,
        })
    }

    /// The devices that batches are priced on.
    pub fn all() -> Vec<Roof> {
        let named = [("A100", BEFORE_HOPPER), ("H100", HOPPER), ("H200", HOPPER)];
        let roofs = named.into_iter();
        roofs
            .filter_map(|(name, reach)| Roof::of(name, reach))
            .collect()
    }

    pub fn seconds(&self, cost: &Cost) -> f64 {
        let share = match cost.engine {
            Engine::Library => self.reach.library,
            Engine::Own | Engine::Memory => self.reach.own,
        };
        let computing = cost.flops as f64 / (self.peak_flops * share);
        let moving = cost.bytes as f64 / (self.gpu.bandwidth_gb_s * 1e9 * self.reach.memory);
        computing
            .max(moving)
            .max(cost.launches as f64 * LAUNCH_SECONDS)
    }
}

/// The kernels of one class, as they take.
#[derive(Clone, Debug)]
pub struct Phase<'a> {
    pub class: OpClass,
    pub kernels: Vec<(&'a KernelUse, &'a Cost)>,
}

/// Costs by class, in the classes' order.
pub fn phases(costs: &Costs) -> Vec<Phase<'_>> {
    let of = |class: OpClass| {
        let kernels = costs.iter().filter(|(used, _)| used.class() == class);
        Phase {
            class,
            kernels: kernels.collect(),
        }
    };
    let all = OpClass::ALL.into_iter().map(of);
    all.filter(|phase| !phase.kernels.is_empty()).collect()
}
