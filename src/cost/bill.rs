//! Hours, money and shard sizes: what a piece of work costs on devices of a given kind.

/// What computes, and what it costs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Devices {
    /// FLOP/s of one device.
    pub peak_flops: f64,
    /// Share of the peak that the work reaches.
    pub mfu: f64,
    pub count: u64,
    /// Of one device for an hour.
    pub price: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bill {
    /// From start to end, all devices at work.
    pub hours: f64,
    pub device_hours: f64,
    pub cost: Option<f64>,
}

impl Devices {
    pub fn bill(&self, flops: f64) -> Bill {
        self.bill_of_seconds(flops / (self.peak_flops * self.mfu))
    }

    /// `seconds` of one device's work, shared out evenly.
    pub fn bill_of_seconds(&self, seconds: f64) -> Bill {
        let device_hours = seconds / 3600.0;
        Bill {
            hours: device_hours / self.count as f64,
            device_hours,
            cost: self.price.map(|price| price * device_hours),
        }
    }
}

/// Model FLOPs per second over the peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
pub fn mfu(flops: f64, seconds: f64, peak_flops: f64) -> f64 {
    flops / seconds / peak_flops
}

/// How long a shard should take where devices are reclaimed, and what that costs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ShardAdvice {
    pub seconds: f64,
    /// Mean seconds of work that a reclaim throws away: half a shard.
    pub lost_seconds: f64,
    /// Share of all time spent on commits and on work done twice.
    pub overhead: f64,
}

/// The shard that wastes least: commits cost the more the shorter it is, a reclaim the more the
/// longer. Young 1974 (A first order approximation to the optimum checkpoint interval,
/// Communications of the ACM 17(9)): sqrt(2 x cost of a commit x time between reclaims).
pub fn shard_advice(reclaims_per_hour: f64, commit_seconds: f64) -> Option<ShardAdvice> {
    if reclaims_per_hour <= 0.0 || commit_seconds <= 0.0 {
        return None;
    }
    let between = 3600.0 / reclaims_per_hour;
    let seconds = (2.0 * commit_seconds * between).sqrt();
    Some(ShardAdvice::of(seconds, reclaims_per_hour, commit_seconds))
}

impl ShardAdvice {
    /// What shards of so many seconds cost.
    pub fn of(seconds: f64, reclaims_per_hour: f64, commit_seconds: f64) -> ShardAdvice {
        ShardAdvice {
            seconds,
            lost_seconds: seconds / 2.0,
            overhead: commit_seconds / seconds + seconds / 2.0 * reclaims_per_hour / 3600.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_money_and_mfu_by_hand() {
        let devices = Devices {
            peak_flops: 1e12,
            mfu: 0.5,
            count: 4,
            price: Some(2.0),
        };
        // 7.2e15 at 5e11 a second are 14,400 s: 4 hours of one device, 1 hour of four, $8.
        let bill = devices.bill(7.2e15);
        assert_eq!(
            (bill.hours, bill.device_hours, bill.cost),
            (1.0, 4.0, Some(8.0))
        );
        // And back: 7.2e15 in 14,400 s of a peak of 1e12 is a half.
        assert_eq!(mfu(7.2e15, 14_400.0, 1e12), 0.5);
    }

    #[test]
    fn the_advised_shard_wastes_least() {
        let waste = |seconds: f64, between: f64| 2.0 / seconds + seconds / 2.0 / between;
        let advice = shard_advice(0.5, 2.0).unwrap();
        assert_eq!(advice.seconds, (2.0f64 * 2.0 * 7200.0).sqrt());
        assert!((advice.overhead - waste(advice.seconds, 7200.0)).abs() < 1e-12);
        for factor in [0.5, 0.9, 1.1, 2.0] {
            assert!(waste(advice.seconds * factor, 7200.0) > advice.overhead);
        }
        assert_eq!(shard_advice(0.0, 2.0), None);
    }
}
