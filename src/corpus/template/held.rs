//! What a name of a template may stand for: values that end, and that are nested no deeper than
//! what can be dropped and printed.
//!
//! The engine adds and repeats lists without copying them, so that a loop which doubles one makes
//! more items than memory holds at the price of a few steps. Whatever gets a name is walked here
//! and charged for, see `rewrite`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, State};

use super::engine::fail;
use super::range::Range;

/// The filter that values get their names through.
pub const HELD: &str = "kdscore_held";
/// Deepest nesting of a value with a name: JSON's own, and what a template may put around it.
const DEPTH_MAX: usize = 256;
/// Items that cost a step, and bytes of text that do, as the engine has it.
const ITEMS_OF_STEP: u64 = 2;
/// How much dearer an item of a sum of lists is, which is looked up through every sum that the sum
/// is made of.
const STEPS_OF_SUM: usize = 16;
const BYTES_OF_STEP: usize = 64;

/// The value itself, paid for.
///
/// # Errors
/// A value nested too deep, or of more items than steps are left for.
pub fn held(state: &State, value: &Value) -> Result<Value, Error> {
    Walk { state, items: 0 }.visit(value, 0)?;
    Ok(value.clone())
}

/// Charges for text that is about to be made.
///
/// # Errors
/// No steps are left.
pub fn charge_bytes(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_OF_STEP) as u64)
}

/// Charges for items that are about to be made.
///
/// # Errors
/// No steps are left.
pub fn charge_items(state: &State, items: usize) -> Result<(), Error> {
    state.consume_fuel(items as u64 / ITEMS_OF_STEP)
}

struct Walk<'a, 't, 'e> {
    state: &'a State<'t, 'e>,
    /// Not paid for yet.
    items: u64,
}

impl Walk<'_, '_, '_> {
    fn visit(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let is_map = match value.kind() {
            ValueKind::Map => true,
            ValueKind::Seq | ValueKind::Iterable => false,
            _ => return Ok(()),
        };
        if value.downcast_object_ref::<Range>().is_some() {
            return Ok(());
        }
        if depth > DEPTH_MAX {
            return Err(fail(format!(
                "expected values nested at most {DEPTH_MAX} deep, found one nested deeper"
            )));
        }
        // A list that says its length is paid for at once, before a walk that would take long.
        let length = value.len();
        let looked_up = match value.kind() {
            ValueKind::Iterable => STEPS_OF_SUM,
            _ => 1,
        };
        self.charge(length.unwrap_or(0).saturating_mul(looked_up))?;
        for item in value.try_iter()? {
            self.charge(usize::from(length.is_none()))?;
            match is_map {
                true => self.visit(&value.get_item(&item)?, depth + 1)?,
                false => self.visit(&item, depth + 1)?,
            }
        }
        Ok(())
    }

    fn charge(&mut self, items: usize) -> Result<(), Error> {
        self.items = self.items.saturating_add(items as u64);
        let steps = self.items / ITEMS_OF_STEP;
        self.items %= ITEMS_OF_STEP;
        self.state.consume_fuel(steps)
    }
}
