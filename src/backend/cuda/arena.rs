//! All device memory of a run: one block, taken once, of a size that a dry run of the same
//! requests has found.
//!
//! Requests go to the lowest place that has room. What a batch takes is given back behind it; the
//! one stream of work makes that safe, since whoever gets the room next writes to it later in the
//! same stream.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

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

#[derive(Debug)]
struct State {
    /// Start to length.
    free: BTreeMap<usize, usize>,
    held: Bytes,
}

/// A part of the arena, given back when it is dropped.
#[derive(Debug)]
pub struct Room {
    arena: Arc<Arena>,
    start: usize,
    bytes: usize,
    what: Use,
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
            block,
            state: Mutex::new(State {
                free: BTreeMap::from([(0, bytes)]),
                held: Bytes::default(),
            }),
        })
    }

    pub fn is_dry(&self) -> bool {
        self.block.is_none()
    }

    /// What is in use now.
    pub fn held(&self) -> Bytes {
        self.state.lock().expect("no thread panics with it").held
    }

    /// # Errors
    /// No room: the plan was too small.
    pub fn take(self: &Arc<Arena>, bytes: usize, what: Use) -> Result<Room> {
        let bytes = bytes.max(1).next_multiple_of(ALIGN);
        let mut state = self.state.lock().expect("no thread panics with it");
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
            arena: self.clone(),
            start,
            bytes,
            what,
        })
    }
}

impl Room {
    pub fn address(&self) -> u64 {
        let base = self.arena.block.as_ref().map_or(0, |block| block.address);
        base + self.start as u64
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut state = self.arena.state.lock().expect("no thread panics with it");
        *state.held.of(self.what) -= self.bytes;
        let (mut start, mut length) = (self.start, self.bytes);
        if let Some(behind) = state.free.remove(&(start + length)) {
            length += behind;
        }
        let before = state.free.range(..start).next_back();
        if let Some((before, size)) = before.map(|(&b, &s)| (b, s))
            && before + size == start
        {
            (start, length) = (before, size + length);
        }
        state.free.insert(start, length);
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
                let overlaps = |other: &Room| {
                    other.start < room.start + room.bytes && room.start < other.start + other.bytes
                };
                assert!(!rooms.iter().any(overlaps));
                assert!(room.start + room.bytes <= 64 * ALIGN);
                rooms.push(room);
            }
        }
        drop(rooms);
        assert_eq!(arena.held(), Bytes::default());
        let state = arena.state.lock().unwrap();
        assert_eq!(state.free, BTreeMap::from([(0, 64 * ALIGN)]));
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
