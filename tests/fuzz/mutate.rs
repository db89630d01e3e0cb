//! Seeded mutation of bytes and of JSON values.

use serde_json::{Value, json};

/// splitmix64 (Steele, Lea and Flood 2014).
pub struct Random(u64);

impl Random {
    pub fn new(seed: &str) -> Random {
        let mix = |seed: u64, byte: u8| (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Random(seed.bytes().fold(0xcbf2_9ce4_8422_2325, mix))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// `input`, damaged: as JSON where it is JSON, most of the time, else byte by byte.
    pub fn mutate(&mut self, input: &[u8], other: &[u8]) -> Vec<u8> {
        let json = serde_json::from_slice::<Value>(input);
        if let (Ok(mut value), true) = (json, self.below(4) > 0) {
            for _ in 0..=self.below(3) {
                self.damage(&mut value);
            }
            return value.to_string().into_bytes();
        }
        let mut bytes = input.to_vec();
        for _ in 0..=self.below(4) {
            self.damage_bytes(&mut bytes, other);
        }
        bytes
    }

    /// One place of a JSON value, changed.
    fn damage(&mut self, value: &mut Value) {
        match value {
            Value::Object(keys) if !keys.is_empty() && self.below(8) > 0 => {
                let key = keys.keys().nth(self.below(keys.len())).unwrap().clone();
                match self.below(8) {
                    0 => drop(keys.remove(&key)),
                    1 => {
                        let moved = keys[&key].clone();
                        let name = self.pick(&["", "x", "type", "rope_type", "0"]);
                        keys.insert((*name).to_owned(), moved);
                    }
                    _ => self.damage(&mut keys[&key]),
                }
            }
            Value::Array(items) if !items.is_empty() && self.below(8) > 0 => {
                let at = self.below(items.len());
                match self.below(8) {
                    0 => drop(items.remove(at)),
                    1 => items.push(items[at].clone()),
                    _ => self.damage(&mut items[at]),
                }
            }
            _ => *value = self.odd_value(),
        }
    }

    fn odd_value(&mut self) -> Value {
        let odd = [
            json!(null),
            json!(true),
            json!(false),
            json!(0),
            json!(1),
            json!(-1),
            json!(2),
            json!(3),
            json!(7),
            json!(65_537),
            json!(2_147_483_647u64),
            json!(4_294_967_296u64),
            json!(u64::MAX),
            json!(i64::MIN),
            json!(0.5),
            json!(1e-30),
            json!(1e300),
            json!(-0.0),
            json!(""),
            json!("default"),
            json!("yarn"),
            json!("longrope"),
            json!("dynamic"),
            json!("sliding_attention"),
            json!("F32"),
            json!("\u{0}\u{fffd}🦀"),
            json!([]),
            json!([0, 1]),
            json!([u64::MAX, 2]),
            json!({}),
            json!({"type": "linear", "factor": 0.1}),
        ];
        self.pick(&odd).clone()
    }

    fn damage_bytes(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(bytes.len() + 1);
        match self.below(6) {
            0 => bytes.truncate(at),
            1 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            2 if at < bytes.len() => bytes[at] = self.next() as u8,
            3 => bytes.insert(at, self.next() as u8),
            4 => {
                let end = (at + self.below(32)).min(bytes.len());
                bytes.drain(at..end);
            }
            _ if !other.is_empty() => {
                let from = self.below(other.len());
                let to = (from + self.below(64)).min(other.len());
                bytes.splice(at..at, other[from..to].iter().copied());
            }
            _ => {}
        }
        bytes.truncate(1 << 20);
    }
}
