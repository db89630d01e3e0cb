//! From the kernels' sources to images that the driver loads: compiled by NVRTC at first use, then
//! kept.
//!
//! An image is kept under everything that decides it: source and headers, architecture, options,
//! and NVRTC's version.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt::Debug;
use std::path::PathBuf;
use std::ptr;

use anyhow::{Context, Result, ensure};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::driver::Version;
use super::libraries::{Getter, NvrtcLibrary, Places, Program, SizeGetter, Wanted};

/// The same that the kernels are checked with.
const OPTIONS: [&str; 2] = ["--std=c++17", "--device-as-default-execution-space"];

/// A file of the program's own, by name.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    pub name: &'static str,
    text: &'static str,
}

macro_rules! sources {
    ($($name:literal),*) => {
        [$(Source {
            name: $name,
            text: include_str!(concat!("../../../cuda/", $name)),
        }),*]
    };
}

pub const KERNELS: [Source; 10] = sources![
    "activation.cu",
    "attention.cu",
    "attention_f32.cu",
    "elementwise.cu",
    "embedding.cu",
    "experts.cu",
    "head.cu",
    "matmul.cu",
    "norm.cu",
    "rope.cu"
];

const HEADERS: [Source; 4] = sources!["attention.cuh", "common.cuh", "keys.cuh", "matmul.cuh"];

/// Where images are kept from one run to the next. Losing them costs only time.
pub trait KernelCache: Send + Sync + Debug {
    fn get(&self, key: &str) -> Option<Vec<u8>>;

    fn put(&self, key: &str, image: &[u8]);
}

/// What images are made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// Code of this architecture.
    Cubin(u32),
    /// PTX of this one, which the driver compiles for a newer device.
    Ptx(u32),
}

impl Target {
    /// For a device of `arch`, by a compiler that knows `known`.
    fn choose(arch: u32, known: &[u32]) -> Option<Target> {
        let newest = known.iter().copied().filter(|&known| known <= arch).max()?;
        Some(match newest == arch {
            true => Target::Cubin(arch),
            false => Target::Ptx(newest),
        })
    }

    fn option(self) -> String {
        match self {
            Target::Cubin(arch) => format!("--gpu-architecture=sm_{arch}"),
            Target::Ptx(arch) => format!("--gpu-architecture=compute_{arch}"),
        }
    }

    /// How it stands in provenance.
    pub fn name(self) -> String {
        match self {
            Target::Cubin(arch) => format!("sm_{arch}"),
            Target::Ptx(arch) => format!("compute_{arch} (PTX)"),
        }
    }
}

/// What the driver loads, made of one source.
#[derive(Debug)]
pub struct Image {
    pub file: &'static str,
    pub bytes: Vec<u8>,
}

/// All kernels for a device.
#[derive(Debug)]
pub struct Images {
    pub list: Vec<Image>,
    pub nvrtc: Version,
    pub nvrtc_path: PathBuf,
    pub target: Target,
    /// Over all images.
    pub sha256: String,
}

impl Images {
    /// Compiles what is not kept yet.
    ///
    /// # Errors
    /// No NVRTC, or one that refuses a source.
    pub fn make(
        arch: u32,
        driver: Version,
        places: &Places,
        cache: &dyn KernelCache,
    ) -> Result<Images> {
        let compiler = Compiler::find(arch, driver, places)?;
        let made: Result<Vec<Image>> = KERNELS
            .par_iter()
            .map(|source| {
                Ok(Image {
                    file: source.name,
                    bytes: compiler.image(source, cache)?,
                })
            })
            .collect();
        let list = made?;
        let mut all = Sha256::new();
        list.iter().for_each(|image| all.update(&image.bytes));
        Ok(Images {
            list,
            nvrtc: compiler.version,
            nvrtc_path: compiler.nvrtc.path,
            target: compiler.target,
            sha256: hex(&all.finalize()),
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// NVRTC, and what it is told to make.
struct Compiler {
    nvrtc: NvrtcLibrary,
    version: Version,
    target: Target,
}

impl Compiler {
    /// The first NVRTC that knows the architecture; else the one that knows the newest below it.
    fn find(arch: u32, driver: Version, places: &Places) -> Result<Compiler> {
        let mut second: Option<Compiler> = None;
        let found = places.find(Wanted::Nvrtc, driver, |opened| {
            let nvrtc = NvrtcLibrary::new(opened)?;
            let version = nvrtc.read_version()?;
            if version.major > driver.major {
                return Ok(None);
            }
            let known = nvrtc.known_archs()?;
            let target = Target::choose(arch, &known).with_context(|| {
                format!(
                    "it makes no code for compute capability {}.{}",
                    arch / 10,
                    arch % 10
                )
            })?;
            let compiler = Compiler {
                nvrtc,
                version,
                target,
            };
            if matches!(target, Target::Cubin(_)) {
                return Ok(Some(compiler));
            }
            let newer = |kept: &Compiler| match (kept.target, target) {
                (Target::Ptx(kept), Target::Ptx(found)) => found > kept,
                _ => false,
            };
            if second.as_ref().is_none_or(newer) {
                second = Some(compiler);
            }
            Ok(None)
        });
        match (found, second) {
            (Ok(compiler), _) | (Err(_), Some(compiler)) => Ok(compiler),
            (Err(error), None) => Err(error),
        }
    }

    fn image(&self, source: &Source, cache: &dyn KernelCache) -> Result<Vec<u8>> {
        let key = self.key(source);
        if let Some(kept) = cache.get(&key).and_then(|kept| unsealed(&kept)) {
            return Ok(kept);
        }
        let image = self.nvrtc.compile(source, self.target)?;
        cache.put(&key, &sealed(&image));
        Ok(image)
    }

    fn key(&self, source: &Source) -> String {
        key(source, self.target, self.version)
    }
}

fn key(source: &Source, target: Target, version: Version) -> String {
    let mut hash = Sha256::new();
    let option = target.option();
    let version = version.to_string();
    let options = OPTIONS.iter().copied().chain([&option[..], &version]);
    let files = HEADERS.iter().chain([source]);
    for text in options.chain(files.flat_map(|file| [file.name, file.text])) {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    let name = source.name.trim_end_matches(".cu");
    format!("{name}-{}", hex(&hash.finalize()[..16]))
}

/// An image behind its hash: a damaged file must not reach the device.
fn sealed(image: &[u8]) -> Vec<u8> {
    let mut bytes = Sha256::digest(image).to_vec();
    bytes.extend_from_slice(image);
    bytes
}

fn unsealed(bytes: &[u8]) -> Option<Vec<u8>> {
    let (hash, image) = bytes.split_at_checked(32)?;
    (Sha256::digest(image)[..] == *hash).then(|| image.to_vec())
}

impl NvrtcLibrary {
    fn expect(&self, status: c_int, call: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: a text that lives as long as the library.
        let text = unsafe { CStr::from_ptr((self.error_text)(status)) };
        anyhow::bail!("NVRTC: {call}: {}", text.to_string_lossy())
    }

    fn read_version(&self) -> Result<Version> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers.
        let status = unsafe { (self.version)(&raw mut major, &raw mut minor) };
        self.expect(status, "nvrtcVersion")?;
        Ok(Version {
            major: u32::try_from(major)?,
            minor: u32::try_from(minor)?,
        })
    }

    fn known_archs(&self) -> Result<Vec<u32>> {
        let mut count = 0;
        // SAFETY: writes one number.
        let status = unsafe { (self.arch_count)(&raw mut count) };
        self.expect(status, "nvrtcGetNumSupportedArchs")?;
        let mut archs: Vec<c_int> = vec![0; usize::try_from(count)?];
        // SAFETY: writes as many numbers as it said.
        let status = unsafe { (self.archs)(archs.as_mut_ptr()) };
        self.expect(status, "nvrtcGetSupportedArchs")?;
        Ok(archs.into_iter().map(c_int::cast_unsigned).collect())
    }

    /// The image of one source, PTX with its closing zero.
    fn compile(&self, source: &Source, target: Target) -> Result<Vec<u8>> {
        let c = |text: &str| CString::new(text).context("kernels hold no zero byte");
        let (text, name) = (c(source.text)?, c(source.name)?);
        let headers: Vec<CString> = HEADERS.iter().map(|h| c(h.text)).collect::<Result<_>>()?;
        let names: Vec<CString> = HEADERS.iter().map(|h| c(h.name)).collect::<Result<_>>()?;
        let pointers = |texts: &[CString]| -> Vec<*const c_char> {
            texts.iter().map(|text| text.as_ptr()).collect()
        };
        let mut program = ptr::null_mut();
        let (header_texts, header_names) = (pointers(&headers), pointers(&names));
        // SAFETY: all texts live until the program is destroyed below.
        let status = unsafe {
            (self.create)(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                c_int::try_from(HEADERS.len())?,
                header_texts.as_ptr(),
                header_names.as_ptr(),
            )
        };
        self.expect(status, "nvrtcCreateProgram")?;
        let image = self.compile_program(program, source.name, target);
        // SAFETY: created above, used no more.
        unsafe { (self.destroy)(&raw mut program) };
        image
    }

    fn compile_program(&self, program: Program, name: &str, target: Target) -> Result<Vec<u8>> {
        let arch = target.option();
        let options = OPTIONS.iter().copied().chain([&arch[..]]);
        let options: Vec<CString> = options.map(CString::new).collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let count = c_int::try_from(pointers.len())?;
        // SAFETY: the program was created, and the options live until this returns.
        let status = unsafe { (self.compile)(program, count, pointers.as_ptr()) };
        self.expect(status, "nvrtcCompileProgram")
            .with_context(|| {
                let log = self.read(program, self.log_bytes, self.log);
                let log = String::from_utf8_lossy(&log.unwrap_or_default()).into_owned();
                format!(
                    "{name} for {}: {}",
                    target.name(),
                    log.trim_end_matches('\0')
                )
            })?;
        match target {
            Target::Cubin(_) => self.read(program, self.cubin_bytes, self.cubin),
            Target::Ptx(_) => self.read(program, self.ptx_bytes, self.ptx),
        }
    }

    fn read(&self, program: Program, bytes: SizeGetter, get: Getter) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program lives; writes one number.
        let status = unsafe { bytes(program, &raw mut size) };
        self.expect(status, "the size of what was compiled")?;
        ensure!(size > 0, "NVRTC: expected compiled code, found none");
        let mut out = vec![0u8; size];
        // SAFETY: writes as many bytes as it said.
        let status = unsafe { get(program, out.as_mut_ptr().cast()) };
        self.expect(status, "what was compiled")?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V12: Version = Version {
        major: 12,
        minor: 4,
    };

    #[test]
    fn a_known_architecture_gets_code_and_an_unknown_one_the_newest_ptx() {
        let known = [50, 80, 86, 89, 90];
        assert_eq!(Target::choose(90, &known), Some(Target::Cubin(90)));
        assert_eq!(Target::choose(100, &known), Some(Target::Ptx(90)));
        assert_eq!(Target::choose(87, &known), Some(Target::Ptx(86)));
        assert_eq!(Target::choose(40, &known), None);
    }

    #[test]
    fn a_key_tells_apart_whatever_changes_the_image() {
        let keys = [
            key(&KERNELS[0], Target::Cubin(80), V12),
            key(&KERNELS[1], Target::Cubin(80), V12),
            key(&KERNELS[0], Target::Cubin(90), V12),
            key(&KERNELS[0], Target::Ptx(80), V12),
            key(&KERNELS[0], Target::Cubin(80), Version { major: 13, ..V12 }),
        ];
        let distinct: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
        assert_eq!(keys[0], key(&KERNELS[0], Target::Cubin(80), V12));
    }

    #[test]
    fn a_damaged_image_is_not_used() {
        let mut kept = sealed(b"image");
        assert_eq!(unsealed(&kept), Some(b"image".to_vec()));
        kept[33] ^= 1;
        assert_eq!(unsealed(&kept), None);
        assert_eq!(unsealed(b"short"), None);
    }

    /// A new file must not be forgotten in the lists above.
    #[test]
    fn every_source_is_in_the_program() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let entries = std::fs::read_dir(folder).unwrap();
        let mut there: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        there.sort();
        let listed = KERNELS.iter().chain(&HEADERS).map(|s| s.name.to_owned());
        let mut listed: Vec<String> = listed.collect();
        listed.sort();
        assert_eq!(there, listed);
    }
}
