//! Rows of Parquet and Arrow files: batches of columns, turned into JSON row by row.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, RecordBatch, StructArray};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, DataType, Field, Fields};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Number, Value};

use super::files::Kind;
use crate::corpus::guard::guarded;
use crate::corpus::json::{no_json, parse_strict};
use crate::corpus::problem::{RowProblem, RowResult};
use crate::corpus::rules::NullFields;

/// Rows decoded at a time. Text columns of long chats stay within some megabytes.
const BATCH_ROWS: usize = 256;
/// Deepest nesting of columns.
const DEPTH_MAX: usize = 64;
/// Columns and fields below which a null may be the writer's padding or the user's own.
const FREE_FORM: [&str; 4] = ["tools", "arguments", "parameters", "input"];

/// An open file of columns.
pub struct ColumnFile {
    batches: Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>,
    /// Rows of the batches so far.
    pub rows: u64,
}

impl std::fmt::Debug for ColumnFile {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "ColumnFile at row {}", self.rows)
    }
}

impl ColumnFile {
    pub fn open(path: &Path, kind: Kind) -> Result<ColumnFile> {
        let file = File::open(path).with_context(|| format!("{}: can't open", path.display()))?;
        let batches = guarded(|| batches(file, kind)).map_err(|e| anyhow!("{e}"));
        let batches = batches
            .and_then(|b| b)
            .with_context(|| format!("{}: expected a whole {}", path.display(), name(kind)))?;
        Ok(ColumnFile { batches, rows: 0 })
    }

    /// The next batch that holds rows; `None` at the end.
    ///
    /// # Errors
    /// A torn or damaged file.
    pub fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            let next = guarded(|| self.batches.next()).map_err(|e| anyhow!("{e}"))?;
            let Some(batch) = next.transpose().context("expected whole data")? else {
                return Ok(None);
            };
            if batch.num_rows() > 0 {
                self.rows += batch.num_rows() as u64;
                return Ok(Some(batch));
            }
        }
    }
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Parquet => "Parquet file",
        Kind::ArrowStream => "Arrow stream",
        _ => "Arrow file",
    }
}

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>;

fn batches(file: File, kind: Kind) -> Result<Batches> {
    Ok(match kind {
        Kind::Parquet => {
            let builder = ParquetRecordBatchReaderBuilder::try_new(file)?;
            expect_distinct(builder.schema().fields())?;
            Box::new(builder.with_batch_size(BATCH_ROWS).build()?)
        }
        Kind::ArrowStream => {
            expect_end(&file)?;
            let reader = StreamReader::try_new(BufReader::with_capacity(1 << 18, file), None)?;
            expect_distinct(reader.schema().fields())?;
            Box::new(reader.flat_map(sliced))
        }
        _ => {
            let reader = FileReader::try_new(BufReader::with_capacity(1 << 18, file), None)?;
            expect_distinct(reader.schema().fields())?;
            Box::new(reader.flat_map(sliced))
        }
    })
}

/// A stream that was cut between two batches reads like a shorter one, but for its end marker
/// (Arrow columnar format, IPC streaming format).
fn expect_end(mut file: &File) -> Result<()> {
    const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
    let mut found = [0; END.len()];
    let size = file.metadata()?.len();
    if size >= END.len() as u64 {
        file.seek(SeekFrom::End(-(END.len() as i64)))?;
        file.read_exact(&mut found)?;
        file.rewind()?;
    }
    ensure!(
        found == END,
        "expected the marker that ends a stream, found none: it is cut off"
    );
    Ok(())
}

/// Which of two columns of one name is meant can't be guessed.
fn expect_distinct(fields: &Fields) -> Result<()> {
    let mut names = HashSet::new();
    if let Some(field) = fields.iter().find(|f| !names.insert(f.name())) {
        bail!(
            "expected columns of different names, found two named {}",
            field.name()
        );
    }
    fields.iter().try_for_each(|field| {
        let mut inner = field.data_type();
        while let DataType::List(f) | DataType::LargeList(f) | DataType::FixedSizeList(f, _) = inner
        {
            inner = f.data_type();
        }
        match inner {
            DataType::Struct(fields) => expect_distinct(fields),
            _ => Ok(()),
        }
    })
}

/// A stored batch in pieces of a size that is ours.
fn sliced(batch: Result<RecordBatch, ArrowError>) -> Vec<Result<RecordBatch, ArrowError>> {
    match batch {
        Err(error) => vec![Err(error)],
        Ok(batch) => {
            let starts = (0..batch.num_rows()).step_by(BATCH_ROWS);
            let piece =
                |start: usize| Ok(batch.slice(start, BATCH_ROWS.min(batch.num_rows() - start)));
            starts.map(piece).collect()
        }
    }
}

/// One row as an object.
///
/// # Errors
/// A null that may be padding, JSON text that is none, values out of range.
pub fn row(batch: &RecordBatch, index: usize, nulls: NullFields) -> RowResult<Map<String, Value>> {
    let mut object = Map::new();
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        let converter = Converter {
            nulls,
            free: FREE_FORM.contains(&field.name().as_str()),
        };
        let value = converter
            .value(column, field, index, 0)
            .map_err(|p| RowProblem {
                message: format!("{}: {}", field.name(), p.message),
                ..p
            })?;
        object.insert(field.name().clone(), value);
    }
    Ok(object)
}

/// Takes the nulls out of the arguments and schemas of a row of JSON, as a set with fixed columns
/// writes them.
pub fn drop_nulls(row: &mut Map<String, Value>) {
    fn of_value(value: &mut Value, is_free: bool) {
        match value {
            Value::Object(object) => of_object(object, is_free),
            Value::Array(items) => items.iter_mut().for_each(|v| of_value(v, is_free)),
            _ => {}
        }
    }
    fn of_object(object: &mut Map<String, Value>, is_free: bool) {
        object.retain(|_, v| !is_free || !v.is_null());
        for (key, value) in object {
            of_value(value, is_free || FREE_FORM.contains(&key.as_str()));
        }
    }
    of_object(row, false);
}

#[derive(Clone, Copy)]
struct Converter {
    nulls: NullFields,
    /// Inside data of the user's own shape, where a null may mean something.
    free: bool,
}

impl Converter {
    fn value(self, array: &dyn Array, field: &Field, at: usize, depth: usize) -> RowResult<Value> {
        if array.is_null(at) || depth > DEPTH_MAX {
            return Ok(Value::Null);
        }
        let is_json = field
            .metadata()
            .get("ARROW:extension:name")
            .is_some_and(|n| n == "arrow.json");
        let signed = |n: i64| Ok(Value::from(n));
        let unsigned = |n: u64| Ok(Value::from(n));
        match array.data_type() {
            DataType::Null => Ok(Value::Null),
            DataType::Boolean => Ok(array.as_boolean().value(at).into()),
            DataType::Int8 => signed(array.as_primitive::<Int8Type>().value(at).into()),
            DataType::Int16 => signed(array.as_primitive::<Int16Type>().value(at).into()),
            DataType::Int32 => signed(array.as_primitive::<Int32Type>().value(at).into()),
            DataType::Int64 => signed(array.as_primitive::<Int64Type>().value(at)),
            DataType::UInt8 => unsigned(array.as_primitive::<UInt8Type>().value(at).into()),
            DataType::UInt16 => unsigned(array.as_primitive::<UInt16Type>().value(at).into()),
            DataType::UInt32 => unsigned(array.as_primitive::<UInt32Type>().value(at).into()),
            DataType::UInt64 => unsigned(array.as_primitive::<UInt64Type>().value(at)),
            DataType::Float16 => float(array.as_primitive::<Float16Type>().value(at).to_f64()),
            DataType::Float32 => float(array.as_primitive::<Float32Type>().value(at).into()),
            DataType::Float64 => float(array.as_primitive::<Float64Type>().value(at)),
            DataType::Utf8 => text(array.as_string::<i32>().value(at), is_json),
            DataType::LargeUtf8 => text(array.as_string::<i64>().value(at), is_json),
            DataType::Utf8View => text(array.as_string_view().value(at), is_json),
            DataType::List(item) => self.list(&array.as_list::<i32>().value(at), item, depth),
            DataType::LargeList(item) => self.list(&array.as_list::<i64>().value(at), item, depth),
            DataType::FixedSizeList(item, _) => {
                self.list(&array.as_fixed_size_list().value(at), item, depth)
            }
            DataType::Struct(_) => self.object(array, at, depth),
            DataType::Map(_, _) => self.map(&array.as_map().value(at), depth),
            DataType::Dictionary(_, _) => {
                let dictionary = array.as_any_dictionary();
                let key = dictionary.normalized_keys()[at];
                self.value(dictionary.values(), field, key, depth + 1)
            }
            // Such a column is only in the way of formats that read it.
            other => Ok(no_json(&format!("a value of type {other}"))),
        }
    }

    fn list(self, items: &dyn Array, field: &Field, depth: usize) -> RowResult<Value> {
        let item = |i: usize| self.value(items, field, i, depth + 1);
        (0..items.len())
            .map(item)
            .collect::<RowResult<Vec<_>>>()
            .map(Value::Array)
    }

    /// A map has the keys that it was given, so a null is one.
    fn map(self, entries: &StructArray, depth: usize) -> RowResult<Value> {
        let [keys, values] = &entries.fields()[..] else {
            return Ok(no_json("a value of type Map without keys and values"));
        };
        let mut object = Map::new();
        for at in 0..entries.len() {
            let Value::String(key) = self.value(entries.column(0), keys, at, depth + 1)? else {
                return Ok(no_json("a value of type Map with keys that are no strings"));
            };
            let inner = Converter {
                free: self.free || FREE_FORM.contains(&key.as_str()),
                ..self
            };
            let value = inner.value(entries.column(1), values, at, depth + 1)?;
            object.insert(key, value);
        }
        Ok(object.into())
    }

    /// A struct has every field in every row, so a null may stand for a key that was not there.
    fn object(self, array: &dyn Array, at: usize, depth: usize) -> RowResult<Value> {
        let array = array.as_struct();
        let mut object = Map::new();
        for (field, column) in array.fields().iter().zip(array.columns()) {
            let inner = Converter {
                free: self.free || FREE_FORM.contains(&field.name().as_str()),
                ..self
            };
            let value = inner.value(column, field, at, depth + 1)?;
            match (value.is_null(), self.free, self.nulls) {
                (false, _, _) | (_, true, NullFields::Keep) => {
                    object.insert(field.name().clone(), value);
                }
                (true, false, _) | (_, true, NullFields::Drop) => {}
                (true, true, NullFields::Error) => {
                    return Err(RowProblem::unusable(format!(
                        "expected no nulls in arguments and schemas, found one under {}: the file can't say whether the key was there; \
                         --null-fields drop or keep decides it for all rows",
                        field.name()
                    )));
                }
            }
        }
        Ok(object.into())
    }
}

/// A NaN is a missing number to those who write such files, and is refused where it is read.
fn float(value: f64) -> RowResult<Value> {
    let number = Number::from_f64(value).map(Value::Number);
    let found = if value.is_nan() { "NaN" } else { "Infinity" };
    Ok(number.unwrap_or_else(|| no_json(found)))
}

fn text(text: &str, is_json: bool) -> RowResult<Value> {
    if !is_json {
        return Ok(text.into());
    }
    parse_strict(text).map_err(|e| {
        RowProblem::unusable(format!("expected JSON text in a column of JSON, found {e}"))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::builder::{MapBuilder, StringBuilder};
    use arrow_array::{ArrayRef, BinaryArray, Float64Array, StringArray};

    use super::*;
    use crate::corpus::json::kind;

    #[test]
    fn missing_numbers_are_values_that_no_reader_takes() {
        let column = |numbers: Vec<f64>| Arc::new(Float64Array::from(numbers)) as ArrayRef;
        let batch = RecordBatch::try_from_iter([
            ("score", column(vec![f64::NAN])),
            ("loss", column(vec![f64::NEG_INFINITY])),
            ("text", Arc::new(StringArray::from(vec!["a"])) as ArrayRef),
        ]);
        let row = row(&batch.unwrap(), 0, NullFields::Error).unwrap();
        assert_eq!(row["text"], "a");
        assert_eq!(kind(&row["score"]), "NaN, which is no JSON");
        assert_eq!(kind(&row["loss"]), "an infinity, which is no JSON");
    }

    #[test]
    fn maps_are_objects_and_nulls_keep_their_columns() {
        let mut maps = MapBuilder::new(None, StringBuilder::new(), StringBuilder::new());
        maps.keys().append_value("role");
        maps.values().append_value("user");
        maps.append(true).unwrap();
        let batch = RecordBatch::try_from_iter_with_nullable([
            ("message", Arc::new(maps.finish()) as ArrayRef, true),
            (
                "text",
                Arc::new(StringArray::from(vec![None::<&str>])) as ArrayRef,
                true,
            ),
            (
                "bytes",
                Arc::new(BinaryArray::from(vec![&b"a"[..]])) as ArrayRef,
                true,
            ),
        ]);
        let row = row(&batch.unwrap(), 0, NullFields::Error).unwrap();
        assert_eq!(row["message"]["role"], "user");
        assert_eq!(row["text"], Value::Null);
        assert_eq!(
            kind(&row["bytes"]),
            "a column of a type that rows have no value for"
        );
    }

    #[test]
    fn nulls_of_json_are_dropped_where_they_may_be_padding() {
        let row = serde_json::json!({
            "text": null,
            "messages": [{"name": null, "tool_calls": [{"function": {"arguments": {"a": null, "b": [{"c": null}]}}}]}],
        });
        let mut row = row.as_object().unwrap().clone();
        drop_nulls(&mut row);
        assert_eq!(
            Value::from(row).to_string(),
            r#"{"text":null,"messages":[{"name":null,"tool_calls":[{"function":{"arguments":{"b":[{}]}}}]}]}"#
        );
    }
}
