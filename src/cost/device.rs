//! Whether a teacher fits a device.

use super::MemoryPlan;

/// Share of a device's memory that a process gets to use.
const USABLE: f64 = 0.92;
/// Most devices that a teacher is thought to be split over.
const SPLIT_MAX: u64 = 64;

/// What one device has to hold, and on how many of them a teacher fits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceFit {
    pub weights: u64,
    pub activations: u64,
    pub logits: u64,
    /// Devices over which the weights have to be split: 1 where they fit whole. `None`: no split
    /// helps, or no memory is stated.
    pub split: Option<u64>,
}

impl DeviceFit {
    pub fn needed(&self) -> u64 {
        self.weights + self.activations + self.logits
    }
}

/// `memory` counts activations in f32; the device keeps them in `number_bytes` each, logits in
/// f32. Finished rows are in host memory.
pub fn fit(memory: &MemoryPlan, number_bytes: u64, device_bytes: u64) -> DeviceFit {
    let activations = memory.activations * number_bytes / 4;
    let usable = (device_bytes as f64 * USABLE) as u64;
    let fits =
        |split: &u64| memory.weights.div_ceil(*split) + activations + memory.logits <= usable;
    let splits = (0..=SPLIT_MAX.ilog2()).map(|power| 1 << power);
    DeviceFit {
        weights: memory.weights,
        activations,
        logits: memory.logits,
        split: splits.into_iter().find(fits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_halved_until_they_fit() {
        let memory = MemoryPlan {
            weights: 140_000,
            activations: 4_000,
            logits: 1_000,
            ..MemoryPlan::default()
        };
        // 140 + 2 + 1 = 143 thousand whole; 38 of 73.6 on four.
        assert_eq!(fit(&memory, 2, 200_000).split, Some(1));
        assert_eq!(fit(&memory, 2, 80_000).split, Some(2));
        assert_eq!(fit(&memory, 2, 50_000).split, Some(4));
        assert_eq!(fit(&memory, 2, 3_000).split, None);
        assert_eq!(fit(&memory, 2, 200_000).needed(), 143_000);
    }
}
