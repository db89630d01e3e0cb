//! A checkpoint folder in Hugging Face format: config.json and safetensors files, one or sharded
//! with an index. Weights stay memory-mapped.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::config::Config;
use crate::backend::HostBytes;
use crate::mapped::map_file;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The config and every tensor of a checkpoint, none of it interpreted yet.
#[derive(Debug)]
pub struct Checkpoint {
    pub folder: PathBuf,
    pub config: Config,
    pub tensors: BTreeMap<String, StoredTensor>,
    /// The files the tensors lie in.
    pub files: Vec<PathBuf>,
}

/// One tensor of a safetensors file.
pub struct StoredTensor {
    /// Index into `Checkpoint::files`.
    pub file: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    map: Arc<Mmap>,
    span: std::ops::Range<usize>,
}

impl Checkpoint {
    /// Maps every file and reads its header.
    ///
    /// # Errors
    /// No config or weights, a header that is damaged or does not fit its file, an index that
    /// names what is not there, or a tensor that stands in two files.
    pub fn open(folder: &Path) -> Result<Checkpoint> {
        let config = Config::read(&folder.join("config.json"))?;
        let (files, placed) = weight_files(folder)?;
        let mut tensors = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            read_header(file, index, &mut tensors, &files)?;
        }
        if let Some(placed) = placed {
            check_index(folder, &placed, &tensors, &files)?;
        }
        Ok(Checkpoint {
            folder: folder.to_path_buf(),
            config,
            tensors,
            files,
        })
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|t| t.span.len() as u64).sum()
    }

    pub fn file_of(&self, tensor: &StoredTensor) -> &Path {
        &self.files[tensor.file]
    }
}

impl StoredTensor {
    pub fn bytes(&self) -> &[u8] {
        &self.map[self.span.clone()]
    }

    pub fn shared_bytes(&self) -> HostBytes {
        let owner: Arc<dyn AsRef<[u8]> + Send + Sync> = self.map.clone();
        HostBytes::new(owner, self.span.clone())
    }
}

impl fmt::Debug for StoredTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredTensor({:?} {:?})", self.dtype, self.shape)
    }
}

/// Tensor name to file name, as an index gives it.
type Placed = BTreeMap<String, String>;

/// The files that hold the weights and, where there is an index, what it says.
fn weight_files(folder: &Path) -> Result<(Vec<PathBuf>, Option<Placed>)> {
    let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
    match (single.exists(), index.exists()) {
        // Where both are there, transformers takes the single file.
        (true, _) => Ok((vec![single], None)),
        (false, true) => {
            let placed = read_index(&index)?;
            let mut names: Vec<_> = placed.values().collect();
            names.sort();
            names.dedup();
            let files = names.into_iter().map(|name| folder.join(name)).collect();
            Ok((files, Some(placed)))
        }
        (false, false) => bail!(
            "{}: expected {SINGLE} or {INDEX}, found neither; pytorch_model.bin files must be converted to safetensors first",
            folder.display()
        ),
    }
}

fn read_index(path: &Path) -> Result<Placed> {
    let bytes = std::fs::read(path).with_context(|| format!("{}: can't read", path.display()))?;
    let index: Value = serde_json::from_slice(&bytes)
        .with_context(|| format!("{}: expected JSON", path.display()))?;
    let entries = index.get("weight_map").and_then(Value::as_object);
    let Some(entries) = entries.filter(|e| !e.is_empty()) else {
        bail!(
            "{}: expected an object weight_map of tensor names to file names",
            path.display()
        );
    };
    let mut placed = Placed::new();
    for (tensor, file) in entries {
        let plain = file
            .as_str()
            .filter(|f| Path::new(f).components().count() == 1 && !f.starts_with('.'));
        let Some(file) = plain else {
            bail!(
                "{}: weight_map {tensor:?}: expected the name of a file beside it, found {file}",
                path.display()
            );
        };
        placed.insert(tensor.clone(), file.to_owned());
    }
    Ok(placed)
}

fn read_header(
    file: &Path,
    index: usize,
    tensors: &mut BTreeMap<String, StoredTensor>,
    files: &[PathBuf],
) -> Result<()> {
    let map = Arc::new(map_file(file)?);
    ensure!(
        !map.starts_with(b"version https://git-lfs"),
        "{}: expected a safetensors file, found a Git LFS pointer to one; fetch it with `git lfs pull`",
        file.display()
    );
    let (header_bytes, metadata) = SafeTensors::read_metadata(&map).with_context(|| {
        format!(
            "{}: expected a whole safetensors file, found {} bytes that its header does not fit",
            file.display(),
            map.len()
        )
    })?;
    // The length prefix is 8 bytes; offsets count from the end of the header.
    let data = header_bytes + 8;
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let tensor = StoredTensor {
            file: index,
            dtype: info.dtype,
            shape: info.shape.clone(),
            map: map.clone(),
            span: data + start..data + end,
        };
        if let Some(other) = tensors.insert(name.clone(), tensor) {
            bail!(
                "{}: expected tensor {name} once, found it in {} too",
                file.display(),
                files[other.file].display()
            );
        }
    }
    Ok(())
}

/// Every tensor of the index must be where it says.
fn check_index(
    folder: &Path,
    placed: &Placed,
    tensors: &BTreeMap<String, StoredTensor>,
    files: &[PathBuf],
) -> Result<()> {
    for (name, file) in placed {
        let found = tensors.get(name).map(|t| &files[t.file]);
        ensure!(
            found == Some(&folder.join(file)),
            "{}: expected tensor {name} in {file}, found it {}",
            folder.join(INDEX).display(),
            found.map_or("nowhere".to_owned(), |f| format!("in {}", f.display()))
        );
    }
    Ok(())
}
