//! Matrix products by cuBLASLt, one stored algorithm for each shape of weight.
//!
//! Which algorithm is a matter of rule, never of the clock or of the batch: of those that the
//! library proposes for a constant number of rows, the first that does without split-K and
//! reductions, serves every number of row tiles, and gives a row the same bits wherever it lies.
//! Where none does, the project's own product takes its place.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::fmt::Debug;
use std::path::Path;
use std::ptr;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::driver::{Stream, Version};
use super::libraries::{
    Algorithm, Destroy, Handle, Heuristic, LtLibrary, Places, SetAttribute, Wanted,
};
use super::tensor::{Kind, TILE, View};
use crate::backend::Into;

/// Rows that proposals are asked for, whatever the token budget: another budget must not bring
/// other bits.
const ROWS_ASKED: usize = 16_384;
/// Proposals looked at.
const PROPOSALS_MAX: usize = 16;
/// Rows that every buffer has room for, so that an algorithm is tried on as many rows whatever the
/// token budget: one that a large budget refuses must not pass under a small one.
pub const ROWS_LEAST: usize = 8 * TILE;
/// What the library may use while it multiplies.
pub const WORKSPACE_BYTES: usize = 32 << 20;
/// Every pointer and every row starts at a multiple of this.
const ALIGN: usize = 16;

// Numbers of cublasLt.h, library_types.h and cublas_api.h.
const COMPUTE_32F: c_int = 68;
const R_32F: c_int = 0;
const R_16BF: c_int = 14;
const TRANSPOSED: c_int = 1;
const DESC_TRANSA: c_int = 3;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const DESC_BIAS_DATA_TYPE: c_int = 26;
const EPILOGUE_BIAS: c_int = 4;
const WISH_WORKSPACE: c_int = 1;
const WISH_REDUCTION_MASK: c_int = 3;
const WISH_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
const REDUCTION_NONE: u32 = 0;
const SETTING_ID: c_int = 0;
const SETTING_TILE: c_int = 1;
const SETTING_SPLIT_K: c_int = 2;
const SETTING_REDUCTION: c_int = 3;
const SETTING_STAGES: c_int = 6;
const NOT_SUPPORTED: c_int = 15;

fn data_type(kind: Kind) -> c_int {
    match kind {
        Kind::Bf16 => R_16BF,
        Kind::F32 => R_32F,
    }
}

/// What decides the algorithm of a product.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Shape {
    pub outputs: usize, // N
    pub inputs: usize,  // K
    /// Of x and the weight.
    from: KindName,
    to: KindName,
    pub has_bias: bool,
    pub adds: bool,
}

/// A [`Kind`] that can be put in order.
type KindName = &'static str;

impl Shape {
    pub fn of(product: &Product) -> Shape {
        Shape {
            outputs: product.out.width,
            inputs: product.x.width,
            from: product.x.kind.name(),
            to: product.out.kind.name(),
            has_bias: product.bias != 0,
            adds: product.into == Into::Add,
        }
    }

    /// Whether rows of both sides start where the library's fast kernels need it.
    fn is_aligned(&self, product: &Product) -> bool {
        let [from, to] = [product.x, product.out].map(|view| view.kind.size());
        (self.inputs * from).is_multiple_of(ALIGN) && (self.outputs * to).is_multiple_of(ALIGN)
    }
}

/// out (M, N) = or += x (M, K) · wᵀ (N, K) + bias (N).
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub out: View,
    pub x: View,
    pub weight: u64,
    /// In out's kind, or 0.
    pub bias: u64,
    pub into: Into,
}

impl Product {
    /// Of square matrices of zeros, to ask about.
    fn plain(size: usize) -> Product {
        let square = View {
            address: 0,
            kind: Kind::Bf16,
            rows: size,
            width: size,
        };
        Product {
            out: square,
            x: square,
            weight: 0,
            bias: 0,
            into: Into::Replace,
        }
    }

    /// The same on so many rows from the first on.
    pub fn on_rows(&self, rows: usize) -> Product {
        Product {
            out: self.out.at_row(0, rows),
            x: self.x.at_row(0, rows),
            ..*self
        }
    }
}

/// How a shape is multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    Library(Algorithm),
    /// The project's own product.
    Own,
}

/// Something the library made, destroyed behind it.
struct Owned {
    handle: Handle,
    destroy: Destroy,
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the create function beside this destroy function.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// Operation and layouts of one product on one number of rows.
struct Described {
    product: Owned,
    weight: Owned,
    x: Owned,
    out: Owned,
}

/// The library, and what was chosen.
#[derive(Debug)]
pub struct Gemm {
    lt: LtLibrary,
    handle: Handle,
    choices: Mutex<BTreeMap<Shape, Choice>>,
}

// SAFETY: cuBLASLt's handle may be used from every thread.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

impl Drop for Gemm {
    fn drop(&mut self) {
        // SAFETY: created in `new`.
        unsafe { (self.lt.destroy)(self.handle) };
    }
}

impl Gemm {
    /// # Errors
    /// No cuBLASLt, or none that this driver serves.
    pub fn new(places: &Places, driver: Version, stream: &Stream) -> Result<Gemm> {
        stream.raw()?; // the handle is made on this stream's device
        places.find(Wanted::CublasLt, driver, |opened| {
            let library = LtLibrary::new(opened)?;
            if library.release().major > driver.major {
                return Ok(None);
            }
            let mut handle = ptr::null_mut();
            // SAFETY: writes a handle.
            let status = unsafe { (library.create)(&raw mut handle) };
            expect(status, "cublasLtCreate")?;
            let gemm = Gemm {
                lt: library,
                handle,
                choices: Mutex::new(BTreeMap::new()),
            };
            // One that doesn't know the device is none: the next may.
            gemm.ask(&Product::plain(1024))?;
            Ok(Some(gemm))
        })
    }

    /// The library's version as it states it: 130002 for 13.0.2.
    pub fn version(&self) -> usize {
        // SAFETY: takes nothing.
        unsafe { (self.lt.version)() }
    }

    pub fn path(&self) -> &Path {
        &self.lt.path
    }

    pub fn chosen(&self, shape: &Shape) -> Option<Choice> {
        self.choices
            .lock()
            .expect("no thread panics with it")
            .get(shape)
            .copied()
    }

    pub fn keep(&self, shape: Shape, choice: Choice) {
        let mut choices = self.choices.lock().expect("no thread panics with it");
        choices.insert(shape, choice);
    }

    pub fn forget(&self, shape: &Shape) {
        let mut choices = self.choices.lock().expect("no thread panics with it");
        choices.remove(shape);
    }

    /// What was chosen, in words and numbers, for provenance.
    pub fn record(&self) -> Value {
        let choices = self.choices.lock().expect("no thread panics with it");
        let each = choices.iter().map(|(shape, choice)| {
            let name = format!(
                "{}x{} {}->{}{}{}",
                shape.outputs,
                shape.inputs,
                shape.from,
                shape.to,
                if shape.has_bias { " bias" } else { "" },
                if shape.adds { " add" } else { "" },
            );
            (name, self.record_of(choice))
        });
        Value::Object(each.collect())
    }

    fn record_of(&self, choice: &Choice) -> Value {
        let Choice::Library(algorithm) = choice else {
            return json!("own product");
        };
        let setting = |which| self.setting(algorithm, which).unwrap_or(0);
        let bytes: Vec<u8> = algorithm
            .data
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        let hash = Sha256::digest(&bytes);
        json!({
            "algorithm": setting(SETTING_ID),
            "tile": setting(SETTING_TILE),
            "stages": setting(SETTING_STAGES),
            "sha256": hash[..8].iter().map(|byte| format!("{byte:02x}")).collect::<String>(),
        })
    }

    fn setting(&self, algorithm: &Algorithm, which: c_int) -> Result<u32> {
        let (mut value, mut written) = (0u32, 0);
        let out = (&raw mut value).cast::<c_void>();
        // SAFETY: the settings asked for are numbers of four bytes.
        let status = unsafe { (self.lt.setting)(algorithm, which, out, 4, &raw mut written) };
        expect(status, "cublasLtMatmulAlgoConfigGetAttribute")?;
        Ok(value)
    }

    /// Algorithms that may be used for a product, the library's favourite first: none that splits
    /// K, and each serves every number of row tiles, whatever this run's token budget. Whether they
    /// keep a row's bits is for the caller to try.
    pub fn proposals(&self, stream: &Stream, product: &Product) -> Result<Vec<Algorithm>> {
        stream.raw()?; // the library asks about the thread's device
        let shape = Shape::of(product);
        if !shape.is_aligned(product) {
            return Ok(Vec::new());
        }
        let proposed = self.ask(product)?;
        let fit = proposed.into_iter().filter(|found| {
            let setting = |which| self.setting(&found.algorithm, which);
            found.state == 0
                && found.workspace_bytes <= WORKSPACE_BYTES
                && setting(SETTING_SPLIT_K).is_ok_and(|n| n <= 1)
                && setting(SETTING_REDUCTION).is_ok_and(|scheme| scheme == REDUCTION_NONE)
        });
        let mut kept = Vec::new();
        for found in fit {
            let serves = |tiles| self.serves(product, tiles * TILE, &found.algorithm);
            if (1..=ROWS_ASKED / TILE).all(serves) {
                kept.push(found.algorithm);
            }
        }
        Ok(kept)
    }

    fn ask(&self, product: &Product) -> Result<Vec<Heuristic>> {
        let described = self.describe(&product.on_rows(ROWS_ASKED))?;
        let wish = self.wish()?;
        let mut found = [Heuristic::default(); PROPOSALS_MAX];
        let mut count = 0;
        // SAFETY: all handles live, and there is room for as many results as are asked for.
        let status = unsafe {
            (self.lt.heuristic)(
                self.handle,
                described.product.handle,
                described.weight.handle,
                described.x.handle,
                described.out.handle,
                described.out.handle,
                wish.handle,
                c_int::try_from(PROPOSALS_MAX)?,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        // A shape that it serves by nothing is no error here.
        if status != NOT_SUPPORTED {
            expect(status, "cublasLtMatmulAlgoGetHeuristic")?;
        }
        let count = if status == 0 { count } else { 0 };
        Ok(found[..usize::try_from(count)?].to_vec())
    }

    fn wish(&self) -> Result<Owned> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes a handle.
        let status = unsafe { (self.lt.wish_create)(&raw mut handle) };
        expect(status, "cublasLtMatmulPreferenceCreate")?;
        let wish = Owned {
            handle,
            destroy: self.lt.wish_destroy,
        };
        self.set(
            self.lt.wish_set,
            &wish,
            WISH_WORKSPACE,
            &(WORKSPACE_BYTES as u64),
        )?;
        self.set(
            self.lt.wish_set,
            &wish,
            WISH_REDUCTION_MASK,
            &REDUCTION_NONE,
        )?;
        for which in WISH_ALIGNMENTS {
            self.set(self.lt.wish_set, &wish, which, &(ALIGN as u32))?;
        }
        Ok(wish)
    }

    fn serves(&self, product: &Product, rows: usize, algorithm: &Algorithm) -> bool {
        let Ok(described) = self.describe(&product.on_rows(rows)) else {
            return false;
        };
        let mut result = Heuristic::default();
        // SAFETY: all handles live; writes one result.
        let status = unsafe {
            (self.lt.check)(
                self.handle,
                described.product.handle,
                described.weight.handle,
                described.x.handle,
                described.out.handle,
                described.out.handle,
                algorithm,
                &raw mut result,
            )
        };
        status == 0 && result.workspace_bytes <= WORKSPACE_BYTES
    }

    /// Multiplies whole tiles of rows: those in use and what lies behind them.
    pub fn multiply(
        &self,
        stream: &Stream,
        product: &Product,
        algorithm: &Algorithm,
        workspace: u64,
    ) -> Result<()> {
        let rows = product.x.rows.next_multiple_of(TILE);
        let tiles = product.on_rows(rows);
        let described = self.describe(&tiles)?;
        let one = 1.0f32;
        let beta = if tiles.into == Into::Add { 1.0f32 } else { 0.0 };
        // SAFETY: the layouts say what lies where; buffers have room for whole tiles of rows.
        let status = unsafe {
            (self.lt.multiply)(
                self.handle,
                described.product.handle,
                (&raw const one).cast(),
                tiles.weight,
                described.weight.handle,
                tiles.x.address,
                described.x.handle,
                (&raw const beta).cast(),
                tiles.out.address,
                described.out.handle,
                tiles.out.address,
                described.out.handle,
                algorithm,
                workspace,
                WORKSPACE_BYTES,
                stream.raw()?.cast(),
            )
        };
        expect(status, "cublasLtMatmul")
            .with_context(|| format!("{:?} on {rows} rows", Shape::of(product)))
    }

    /// cuBLASLt thinks in columns: what is (M, N) here is (N, M) there, and the weight comes first.
    fn describe(&self, p: &Product) -> Result<Described> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes a handle.
        let status = unsafe { (self.lt.product_create)(&raw mut handle, COMPUTE_32F, R_32F) };
        expect(status, "cublasLtMatmulDescCreate")?;
        let product = Owned {
            handle,
            destroy: self.lt.product_destroy,
        };
        let set = self.lt.product_set;
        self.set(set, &product, DESC_TRANSA, &TRANSPOSED)?;
        if p.bias != 0 {
            self.set(set, &product, DESC_EPILOGUE, &EPILOGUE_BIAS)?;
            self.set(set, &product, DESC_BIAS_POINTER, &p.bias)?;
            self.set(set, &product, DESC_BIAS_DATA_TYPE, &data_type(p.out.kind))?;
        }
        let (outputs, inputs) = (p.out.width, p.x.width);
        Ok(Described {
            product,
            weight: self.layout(p.x.kind, inputs, outputs)?,
            x: self.layout(p.x.kind, inputs, p.x.rows)?,
            out: self.layout(p.out.kind, outputs, p.x.rows)?,
        })
    }

    /// `columns` columns of `length` numbers that follow one another.
    fn layout(&self, kind: Kind, length: usize, columns: usize) -> Result<Owned> {
        let mut handle = ptr::null_mut();
        let (length, columns) = (length as u64, columns as u64);
        let step = length.cast_signed();
        // SAFETY: writes a handle.
        let status = unsafe {
            (self.lt.layout_create)(&raw mut handle, data_type(kind), length, columns, step)
        };
        expect(status, "cublasLtMatrixLayoutCreate")?;
        Ok(Owned {
            handle,
            destroy: self.lt.layout_destroy,
        })
    }

    fn set<T: Copy>(&self, set: SetAttribute, of: &Owned, which: c_int, value: &T) -> Result<()> {
        // SAFETY: the attributes set here have the types that cublasLt.h gives them.
        let status = unsafe {
            set(
                of.handle,
                which,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        expect(status, "setting an attribute").with_context(|| format!("attribute {which}"))
    }
}

impl LtLibrary {
    fn release(&self) -> Version {
        // SAFETY: takes nothing.
        let number = unsafe { (self.version)() };
        // 12.4.5 is 120405, 13.0.2 is 130002.
        Version {
            major: u32::try_from(number / 10_000).unwrap_or(u32::MAX),
            minor: u32::try_from(number / 100 % 100).unwrap_or(0),
        }
    }
}

fn expect(status: c_int, call: &str) -> Result<()> {
    let meaning = match status {
        0 => return Ok(()),
        1 => "not initialised",
        3 => "out of memory",
        7 => "a value it refuses",
        8 => "a device it doesn't serve",
        13 => "the device failed",
        15 => "not supported",
        _ => "failed",
    };
    ensure!(status == 0, "cuBLASLt: {call}: {meaning} (status {status})");
    Ok(())
}

/// Numbers of rows, whole tiles, on which an algorithm is tried: from one tile to the most there
/// will be.
pub fn rows_to_try(rows_max: usize) -> Vec<usize> {
    let most = rows_max - rows_max % TILE;
    let doubled = (0..).map(|power| TILE << (2 * power));
    let mut rows: Vec<usize> = doubled.take_while(|&rows| rows < most).collect();
    rows.push(most.max(TILE));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_tried_from_one_tile_to_the_most() {
        assert_eq!(rows_to_try(128), [128]);
        assert_eq!(rows_to_try(1000), [128, 512, 896]);
        assert_eq!(rows_to_try(16_384), [128, 512, 2048, 8192, 16_384]);
    }

    #[test]
    fn only_whole_pieces_of_sixteen_bytes_go_to_the_library() {
        let view = |kind, width| View {
            address: 0,
            kind,
            rows: 1,
            width,
        };
        let aligned = |k, n, to| {
            let product = Product {
                out: view(to, n),
                x: view(Kind::Bf16, k),
                weight: 0,
                bias: 0,
                into: Into::Replace,
            };
            Shape::of(&product).is_aligned(&product)
        };
        assert!(aligned(64, 64, Kind::Bf16));
        assert!(!aligned(60, 64, Kind::Bf16));
        assert!(aligned(64, 4, Kind::F32));
        assert!(!aligned(64, 4, Kind::Bf16));
        assert!(!aligned(64, 507, Kind::F32));
    }
}
