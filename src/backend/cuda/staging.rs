//! Between host memory and the device: through pinned memory and on streams of their own, so that
//! neither the host nor the device's work has to wait for a copy that nobody needs yet.
//!
//! What goes up is laid in a ring; its part of the ring is free again once somebody has waited for
//! a later point of that stream. Rows that come down have slots of their own.

use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Context, Result};

use super::driver::{Device, Event, Pinned, Stream};

/// Bytes of the ring.
const RING_BYTES: usize = 32 << 20;
/// Most bytes laid in it at once, so that one piece travels while the next is filled.
const PIECE_BYTES: usize = RING_BYTES / 4;
/// Pieces start at multiples of this.
const ALIGN: usize = 16;

/// A place in the endless row of bytes that went through the ring.
type Place = u64;

#[derive(Debug)]
pub struct Staging {
    device: Arc<Device>,
    up: Stream,
    down: Stream,
    ring: Mutex<Ring>,
}

#[derive(Debug)]
struct Ring {
    pinned: Pinned,
    /// What was sent last.
    sent: Event,
    /// Where the next piece goes.
    next: Place,
    /// What lies before this has arrived.
    arrived: Place,
}

/// Pinned memory for rows that come down, and the point at which they are there.
#[derive(Debug)]
pub struct Slot {
    pinned: Pinned,
    event: Event,
    /// What went up before.
    place: Place,
}

/// Where a piece of `bytes` goes in a ring of `ring` bytes, if what lies from `arrived` on must
/// stay as it is: never across the ring's end.
fn fit(next: Place, arrived: Place, bytes: usize, ring: usize) -> Option<Place> {
    let (bytes, ring) = (bytes as u64, ring as u64);
    let at = next % ring;
    let start = if at + bytes <= ring {
        next
    } else {
        next - at + ring
    };
    (start + bytes <= arrived + ring).then_some(start)
}

impl Staging {
    pub fn new(device: &Arc<Device>) -> Result<Staging> {
        Ok(Staging {
            device: device.clone(),
            up: Stream::new(device)?,
            down: Stream::new(device)?,
            ring: Mutex::new(Ring {
                pinned: Pinned::new(device, RING_BYTES)?,
                sent: Event::new(device)?,
                next: 0,
                arrived: 0,
            }),
        })
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().expect("no thread panics with it")
    }

    /// Sends `bytes` bytes to device memory at `to`, which has room for them and is not in use;
    /// `stream` waits for them before what it is asked for next. `fill` writes them, piece by
    /// piece: it gets the piece and where it starts. Pieces start at multiples of `whole`.
    pub fn upload(
        &self,
        stream: &Stream,
        to: u64,
        [bytes, whole]: [usize; 2],
        mut fill: impl FnMut(&mut [u8], usize),
    ) -> Result<()> {
        let mut ring = self.ring();
        let piece = (PIECE_BYTES / whole).max(1) * whole;
        let mut done = 0;
        while done < bytes {
            let count = piece.min(bytes - done);
            let start = match fit(ring.next, ring.arrived, count, RING_BYTES) {
                Some(start) => start,
                None => {
                    self.up.wait()?;
                    ring.arrived = ring.next;
                    fit(ring.next, ring.arrived, count, RING_BYTES)
                        .with_context(|| format!("rows of {whole} bytes are too wide to be sent"))?
                }
            };
            let at = usize::try_from(start % RING_BYTES as u64)?;
            let room = &mut ring.pinned.bytes()[at..at + count];
            fill(room, done);
            // SAFETY: the caller says that there is room; nobody writes to these bytes before the
            // stream is known to have come past this.
            unsafe { self.up.upload(to + done as u64, room)? };
            ring.next = (start + count as u64).next_multiple_of(ALIGN as u64);
            done += count;
        }
        ring.sent.record(&self.up)?;
        stream.wait_for(&ring.sent)
    }

    /// Brings device memory from `from` on here, and waits for it and whatever `stream` was asked
    /// for before.
    pub fn download(&self, stream: &Stream, from: u64, out: &mut [u8]) -> Result<()> {
        let mut ring = self.ring();
        stream.wait()?;
        ring.arrived = ring.next;
        for (piece, out) in out.chunks_mut(RING_BYTES).enumerate() {
            let room = &mut ring.pinned.bytes()[..out.len()];
            // SAFETY: the caller names device memory as long as `out`; waited for below.
            unsafe { stream.download(room, from + (piece * RING_BYTES) as u64)? };
            stream.wait()?;
            out.copy_from_slice(room);
        }
        Ok(())
    }

    pub fn slot(&self, bytes: usize) -> Result<Slot> {
        Ok(Slot {
            pinned: Pinned::new(&self.device, bytes)?,
            event: Event::new(&self.device)?,
            place: 0,
        })
    }

    /// Sends `bytes` bytes of device memory from `from` on to a slot that has room for them, as
    /// `stream` leaves them.
    pub fn send_down(
        &self,
        stream: &Stream,
        from: u64,
        bytes: usize,
        slot: &mut Slot,
    ) -> Result<()> {
        slot.place = self.ring().next;
        slot.event.record(stream)?;
        self.down.wait_for(&slot.event)?;
        // SAFETY: the caller names device memory of so many bytes; whoever reads the slot waits
        // for its event first.
        unsafe {
            self.down
                .download(&mut slot.pinned.bytes()[..bytes], from)?
        };
        slot.event.record(&self.down)
    }

    /// Waits for what was sent to a slot, and gives its bytes.
    pub fn receive<'a>(&self, slot: &'a mut Slot) -> Result<&'a [u8]> {
        slot.wait()?;
        let mut ring = self.ring();
        ring.arrived = ring.arrived.max(slot.place);
        Ok(slot.pinned.bytes())
    }
}

impl Slot {
    /// Until what was sent is here.
    pub fn wait(&self) -> Result<()> {
        self.event.wait()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_never_cross_the_end_nor_what_has_not_arrived() {
        assert_eq!(fit(0, 0, 100, 100), Some(0));
        assert_eq!(fit(40, 0, 60, 100), Some(40));
        assert_eq!(fit(40, 0, 61, 100), None);
        assert_eq!(fit(40, 30, 61, 100), None);
        // Behind the end it starts again, over what has arrived.
        assert_eq!(fit(40, 40, 40, 100), Some(40));
        assert_eq!(fit(90, 40, 40, 100), Some(100));
        assert_eq!(fit(90, 40, 41, 100), None);
        assert_eq!(fit(90, 90, 90, 100), Some(100));
        assert_eq!(fit(90, 90, 91, 100), None);
    }

    /// Every piece that is laid over another comes after that one has arrived.
    #[test]
    fn a_ring_of_draws_keeps_what_is_on_its_way() {
        let ring = 1000usize;
        let (mut next, mut arrived, mut state) = (0u64, 0u64, 3u64);
        let mut under_way: Vec<(u64, u64)> = Vec::new();
        for _ in 0..5000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let bytes = (state >> 33) as usize % 250 + 1;
            let start = fit(next, arrived, bytes, ring).unwrap_or_else(|| {
                arrived = next;
                under_way.clear();
                fit(next, arrived, bytes, ring).unwrap()
            });
            let at = start % ring as u64;
            assert!(at + bytes as u64 <= ring as u64);
            let hits = |(s, e): &(u64, u64)| at < *e && *s < at + bytes as u64;
            assert!(!under_way.iter().any(hits));
            under_way.push((at, at + bytes as u64));
            next = start + bytes as u64;
        }
    }
}
