//! Reduced rows on the device, until they are taken.

use std::sync::{Arc, Mutex};

use anyhow::Result;

use super::Cuda;
use super::arena::{Given, Room, Use};
use super::parameters::DeviceRows;
use super::staging::Slot;
use crate::backend::HeadRows;

/// Numbers of four bytes that a row has one of each of: tail, target's log-prob and rank,
/// logsumexp, entropy, padded mass.
const SINGLES: usize = 6;

/// Room for rows on the device, and pinned room for them here.
#[derive(Debug)]
pub struct Seat {
    pub room: Room,
    pub slot: Slot,
    bytes: usize,
}

/// Seats that nobody has.
pub type Seats = Arc<Mutex<Vec<Seat>>>;

/// The rows of a batch.
#[derive(Debug)]
pub struct RowsOnDevice {
    /// `Some` as long as this lives.
    seat: Option<Seat>,
    seats: Seats,
    pub layout: RowLayout,
    /// Rows that were reduced.
    pub filled: usize,
    /// What was given back until they were sent.
    pub sent: Option<Given>,
}

impl RowsOnDevice {
    pub fn seat(&mut self) -> &mut Seat {
        self.seat.as_mut().expect("it is given back in drop alone")
    }
}

/// Rows that were sent and that nobody took are waited for: their copy may be under way.
impl Drop for RowsOnDevice {
    fn drop(&mut self) {
        if let Some(seat) = self.seat.take()
            && (self.sent.is_none() || seat.slot.wait().is_ok())
        {
            self.seats
                .lock()
                .expect("no thread panics with it")
                .push(seat);
        }
    }
}

impl Cuda {
    /// Adds seats for `bytes` bytes of rows. All are as large as the largest batch needs, so that
    /// none is ever too small and no hole too narrow.
    pub(super) fn make_seats(&self, count: usize, bytes: usize) -> Result<()> {
        let made = (0..count).map(|_| self.new_seat(bytes));
        let made: Vec<Seat> = made.collect::<Result<_>>()?;
        self.seats
            .lock()
            .expect("no thread panics with it")
            .extend(made);
        Ok(())
    }

    fn new_seat(&self, bytes: usize) -> Result<Seat> {
        Ok(Seat {
            room: self.arena.take(bytes, Use::Batch)?,
            slot: self.made.staging.slot(bytes)?,
            bytes,
        })
    }

    /// Rows of the smallest seat that is free and has room for them, or a new one.
    pub(super) fn rows_of(&self, layout: RowLayout) -> Result<RowsOnDevice> {
        let mut seats = self.seats.lock().expect("no thread panics with it");
        let fit = seats.iter().enumerate();
        let fit = fit.filter(|(_, seat)| seat.bytes >= layout.bytes());
        let found = fit.min_by_key(|(_, seat)| seat.bytes).map(|(at, _)| at);
        let seat = match found {
            Some(at) => seats.swap_remove(at),
            None => self.new_seat(layout.bytes())?,
        };
        Ok(RowsOnDevice {
            seat: Some(seat),
            seats: self.seats.clone(),
            layout,
            filled: 0,
            sent: None,
        })
    }
}

/// Where each product of the rows lies: arrays behind one another, each as long as the most rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowLayout {
    pub rows_max: usize,
    pub k: usize,
}

impl RowLayout {
    pub fn bytes(&self) -> usize {
        self.rows_max * (self.k * 8 + SINGLES * 4 + 1)
    }

    /// Where rows from `first` on go, for arrays that start at `start`.
    pub fn at_row(&self, start: u64, first: usize) -> DeviceRows {
        let wide = self.rows_max * self.k * 4;
        let single =
            |number: usize| start + (2 * wide + number * self.rows_max * 4 + first * 4) as u64;
        let of_ids = (first * self.k * 4) as u64;
        DeviceRows {
            ids: start + of_ids,
            logp: start + wide as u64 + of_ids,
            tail: single(0),
            target_logp: single(1),
            target_rank: single(2),
            logsumexp: single(3),
            entropy: single(4),
            padded_mass: single(5),
            bad: start + (2 * wide + SINGLES * self.rows_max * 4 + first) as u64,
        }
    }

    /// The first `rows` rows of downloaded arrays.
    pub fn read(&self, bytes: &[u8], rows: usize) -> HeadRows {
        let at = self.at_row(0, 0);
        let four = |start: u64, count: usize| {
            let start = usize::try_from(start).unwrap_or(usize::MAX);
            bytes[start..start + count * 4].as_chunks::<4>().0.iter()
        };
        let ints = |start, count| four(start, count).map(|b| i32::from_le_bytes(*b)).collect();
        let floats = |start, count| four(start, count).map(|b| f32::from_le_bytes(*b)).collect();
        let bad = usize::try_from(at.bad).unwrap_or(usize::MAX);
        HeadRows {
            k: self.k,
            ids: ints(at.ids, rows * self.k),
            logp: floats(at.logp, rows * self.k),
            tail: floats(at.tail, rows),
            target_logp: floats(at.target_logp, rows),
            target_rank: ints(at.target_rank, rows),
            logsumexp: floats(at.logsumexp, rows),
            entropy: floats(at.entropy, rows),
            padded_mass: floats(at.padded_mass, rows),
            bad_row: bytes[bad..bad + rows].iter().position(|&flag| flag != 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_lie_behind_one_another_and_are_read_back() {
        let layout = RowLayout { rows_max: 3, k: 2 };
        assert_eq!(layout.bytes(), 3 * (16 + 24 + 1));
        let at = layout.at_row(1000, 1);
        assert_eq!((at.ids, at.logp, at.tail), (1008, 1032, 1052));
        assert_eq!(at.bad, 1000 + 48 + 72 + 1);
        let mut bytes = vec![0u8; layout.bytes()];
        let first = layout.at_row(0, 0);
        let second = layout.at_row(0, 1);
        bytes[second.ids as usize..][..4].copy_from_slice(&7i32.to_le_bytes());
        bytes[first.entropy as usize..][..4].copy_from_slice(&2.5f32.to_le_bytes());
        bytes[second.bad as usize] = 1;
        let rows = layout.read(&bytes, 2);
        assert_eq!(rows.ids, [0, 0, 7, 0]);
        assert_eq!(rows.entropy, [2.5, 0.0]);
        assert_eq!(rows.bad_row, Some(1));
        assert_eq!(layout.read(&bytes, 1).bad_row, None);
    }
}
