//! Python's `range`, which is a list in all but how it prints.

use std::fmt;
use std::sync::Arc;

use minijinja::Error;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value};

use super::engine::fail;

/// Jinja's sandbox allows as many.
const ITEMS_MAX: usize = 100_000;

#[derive(Debug)]
pub struct Range {
    start: i64,
    stop: i64,
    step: i64,
    items: usize,
}

impl Range {
    /// # Errors
    /// A step of 0, or too many items.
    pub fn make(first: i64, second: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
        let (start, stop) = second.map_or((0, first), |stop| (first, stop));
        let step = step.unwrap_or(1);
        if step == 0 {
            return Err(fail("range: expected a step other than 0"));
        }
        let (from, to) = if step > 0 {
            (start, stop)
        } else {
            (stop, start)
        };
        let span = i128::from(to) - i128::from(from);
        let items = match span > 0 {
            true => (span as u128).div_ceil(u128::from(step.unsigned_abs())),
            false => 0,
        };
        if items > ITEMS_MAX as u128 {
            return Err(fail(format!(
                "range: expected at most {ITEMS_MAX} items, found {items}"
            )));
        }
        Ok(Value::from_object(Range {
            start,
            stop,
            step,
            items: items as usize,
        }))
    }
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = key.as_usize().filter(|&at| at < self.items)?;
        // An item lies between start and stop, so what wraps around wraps back.
        let offset = self.step.wrapping_mul(at as i64);
        Some(Value::from(self.start.wrapping_add(offset)))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "range({}, {}", self.start, self.stop)?;
        if self.step != 1 {
            write!(f, ", {}", self.step)?;
        }
        f.write_str(")")
    }
}
