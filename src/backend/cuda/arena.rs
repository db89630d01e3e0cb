//! All device memory of a run: one block, taken once, of a size that a dry run of the same
//! requests has found.
//!
//! Requests go to the lowest place that has room. What a batch takes is given back behind it, while
//! the device may still be at work on it: such room is kept until the device is known to have come
//! past that, so that whoever gets it next may fill it at once, on any stream.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Result, ensure};

use super::driver::{Block, Device};

/// Every room starts at a multiple of this.
const ALIGN: usize = 256;

/// What memory is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    Weights,
    Buffers,
    /// What comes and goes with each batch.
    Batch,
}

/// Bytes by use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bytes {
    pub weights: usize,
    pub buffers: usize,
    pub batch: usize,
    /// Of pinned host memory, for the rows of a batch; two of them are on their way at most.
    pub slot: usize,
}

impl Bytes {
    /// Of the device.
    pub fn total(&self) -> usize {
        self.weights + self.buffers + self.batch
    }

    fn of(&mut self, what: Use) -> &mut usize {
        match what {
            Use::Weights => &mut self.weights,
            Use::Buffers => &mut self.buffers,
            Use::Batch => &mut self.batch,
        }
    }
}

#[derive(Debug)]
pub struct Arena {
    /// `None` in a dry run.
    block: Option<Block>,
    state: Mutex<State>,
}

/// A number of rooms given back so far: a point in the order of work.
pub type Given = u64;

#[derive(Debug, Default)]
struct State {
    /// Start to length.
    free: BTreeMap<usize, usize>,
    /// Given back in this order, perhaps in use by the device.
    left: VecDeque<Place>,
    /// Given back before those.
    settled: Given,
    held: Bytes,
    /// Whether a device may use what is given back; nobody does in a dry run.
    is_used: bool,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    start: usize,
    bytes: usize,
    what: Use,
}

/// A part of the arena, given back when it is dropped.
#[derive(Debug)]
pub struct Room {
    arena: Arc<Arena>,
    place: Place,
}

impl Arena {
    /// Room without end, and nothing behind it.
    pub fn dry() -> Arc<Arena> {
        Arena::over(None, usize::MAX / 2)
    }

    /// # Errors
    /// A device with less memory than that.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Arc<Arena>> {
        Ok(Arena::over(Some(Block::new(device, bytes)?), bytes))
    }

    fn over(block: Option<Block>, bytes: usize) -> Arc<Arena> {
        Arc::new(Arena {
            state: Mutex::new(State {
                free: BTreeMap::from([(0, bytes)]),
                is_used: block.is_some(),
                ..State::default()
            }),
            block,
        })
    }

    pub fn is_dry(&self) -> bool {
        self.block.is_none()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with it")
    }

    /// What is in use now.
    pub fn held(&self) -> Bytes {
        self.state().held
    }

    /// Rooms given back until now.
    pub fn given(&self) -> Given {
        let state = self.state();
        state.settled + state.left.len() as Given
    }

    /// Says that the device has come past what it did with the rooms given back until `point`.
    pub fn settle(&self, point: Given) {
        let mut state = self.state();
        while state.settled < point {
            let Some(place) = state.left.pop_front() else {
                return;
            };
            state.settled += 1;
            state.release(place);
        }
    }

    /// # Errors
    /// No room: the plan was too small.
    pub fn take(self: &Arc<Arena>, bytes: usize, what: Use) -> Result<Room> {
        let bytes = bytes.max(1).next_multiple_of(ALIGN);
        let mut state = self.state();
        let found = state.free.iter().find(|(_, length)| **length >= bytes);
        let found = found.map(|(&start, &length)| (start, length));
        ensure!(
            found.is_some(),
            "expected {bytes} free bytes of the device memory planned, found {} in the largest piece, {} in use; a smaller --token-budget needs less",
            state.free.values().max().unwrap_or(&0),
            state.held.total()
        );
        let (start, length) = found.unwrap_or_default();
        state.free.remove(&start);
        if length > bytes {
            state.free.insert(start + bytes, length - bytes);
        }
        *state.held.of(what) += bytes;
        Ok(Room {
            place: Place { start, bytes, what },
            arena: self.clone(),
        })
    }
}

impl State {
    fn release(&mut self, place: Place) {
        *self.held.of(place.what) -= place.bytes;
        let (mut start, mut length) = (place.start, place.bytes);
        if let Some(behind) = self.free.remove(&(start + length)) {
            length += behind;
        }
        let before = self.free.range(..start).next_back();
        if let Some((before, size)) = before.map(|(&b, &s)| (b, s))
            && before + size == start
        {
            (start, length) = (before, size + length);
        }
        self.free.insert(start, length);
    }
}

impl Room {
    pub fn address(&self) -> u64 {
        let base = self.arena.block.as_ref().map_or(0, |block| block.address);
        base + self.place.start as u64
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut state = self.arena.state();
        if state.is_used {
            state.left.push_back(self.place);
        } else {
            state.release(self.place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_never_overlap_and_come_back_whole() {
        let arena = Arena::over(None, 64 * ALIGN);
        let mut rooms: Vec<Room> = Vec::new();
        let mut state = 7u64;
        for _ in 0..2000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let draw = (state >> 33) as usize;
            if draw.is_multiple_of(3) && !rooms.is_empty() {
                rooms.swap_remove(draw / 3 % rooms.len());
            } else if let Ok(room) = arena.take(draw % (6 * ALIGN), Use::Batch) {
                let Place { start, bytes, .. } = room.place;
                let overlaps = |other: &Room| {
                    let other = other.place;
                    other.start < start + bytes && start < other.start + other.bytes
                };
                assert!(!rooms.iter().any(overlaps));
                assert!(start + bytes <= 64 * ALIGN);
                rooms.push(room);
            }
        }
        drop(rooms);
        assert_eq!(arena.held(), Bytes::default());
        let state = arena.state.lock().unwrap();
        assert_eq!(state.free, BTreeMap::from([(0, 64 * ALIGN)]));
    }

    #[test]
    fn room_the_device_may_use_is_kept_until_it_is_past_that() {
        let arena = Arena::over(None, 3 * ALIGN);
        arena.state().is_used = true;
        let take = |bytes| arena.take(bytes, Use::Batch);
        drop(take(ALIGN));
        let first = arena.given();
        drop(take(ALIGN));
        let third = take(ALIGN).unwrap();
        assert!(take(ALIGN).is_err());
        arena.settle(first);
        assert_eq!(take(ALIGN).unwrap().place.start, 0);
        assert!(take(2 * ALIGN).is_err());
        drop(third);
        assert_eq!(arena.held().batch, 3 * ALIGN);
        arena.settle(Given::MAX);
        assert_eq!(arena.held(), Bytes::default());
        assert_eq!(arena.given(), 4);
    }

    #[test]
    fn too_little_room_is_told_with_numbers() {
        let arena = Arena::over(None, 4 * ALIGN);
        let _held = arena.take(3 * ALIGN, Use::Weights).unwrap();
        let error = arena.take(2 * ALIGN, Use::Batch).unwrap_err().to_string();
        assert!(
            error.contains("expected 512") && error.contains("found 256"),
            "{error}"
        );
        assert_eq!(arena.held().weights, 3 * ALIGN);
    }
}
