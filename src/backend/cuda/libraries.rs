//! Where NVRTC and cuBLASLt are found: in the folder the user names, a CUDA toolkit, on the
//! loader's path, or among the NVIDIA wheels of a Python environment.
//!
//! Architecture invariant: a library of a newer major version than the driver's is passed over;
//! its code doesn't run there.

use std::ffi::{OsString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use anyhow::{Error, Result, bail};
use glob::Pattern;
use libloading::Library;
use libloading::os::unix;

use super::driver::Version;

/// Older libraries lack what is used here.
const MAJOR_MIN: u32 = 12;

/// A library that is looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    Nvrtc,
    CublasLt,
}

impl Wanted {
    fn stem(self) -> &'static str {
        match self {
            Wanted::Nvrtc => "libnvrtc",
            Wanted::CublasLt => "libcublasLt",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Wanted::Nvrtc => "NVRTC, which compiles the kernels",
            Wanted::CublasLt => "cuBLASLt, which multiplies matrices",
        }
    }

    /// The Python package whose wheel holds it.
    fn package(self, major: u32) -> String {
        let name = match self {
            Wanted::Nvrtc => "nvidia-cuda-nvrtc",
            Wanted::CublasLt => "nvidia-cublas",
        };
        match major {
            12 => format!("{name}-cu12"),
            _ => format!("\"{name}=={major}.*\""),
        }
    }
}

/// Where to look, taken from the environment once.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Places {
    /// `--cuda-libs`.
    pub given: Option<PathBuf>,
    /// Toolkits.
    pub toolkits: Vec<PathBuf>,
    /// Prefixes of Python and conda environments: libraries lie in `lib` and in
    /// `lib/python3.X/site-packages`.
    pub environments: Vec<PathBuf>,
}

impl Places {
    pub fn new(given: Option<PathBuf>) -> Places {
        let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable);
        let usual = PathBuf::from("/usr/local/cuda");
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter();
        let environments = environments.filter_map(variable);
        // Where a system's own pip installs.
        let local = PathBuf::from("/usr/local");
        let home = variable("HOME").map(|home| home.join(".local"));
        let on_path = prefixes_of_pythons(std::env::var_os("PATH"));
        Places {
            given,
            toolkits: toolkits.chain([usual]).collect(),
            environments: environments
                .chain(on_path)
                .chain([local])
                .chain(home)
                .collect(),
        }
    }

    /// Folders that may hold the library, the first ones first. `None` is the loader's own path.
    fn folders(&self) -> Vec<Option<PathBuf>> {
        let mut folders = Vec::new();
        if let Some(given) = &self.given {
            folders.push(given.clone());
            folders.extend(["lib", "lib64"].map(|name| given.join(name)));
            folders.extend(wheels(given));
            folders.extend(wheels(&given.join("nvidia")));
            folders.extend(packages(given).iter().flat_map(|site| wheels(site)));
        }
        for toolkit in &self.toolkits {
            folders.extend(["lib64", "lib"].map(|name| toolkit.join(name)));
        }
        let mut folders: Vec<Option<PathBuf>> = folders.into_iter().map(Some).collect();
        folders.push(None);
        for prefix in &self.environments {
            let sites = packages(prefix);
            folders.extend(sites.iter().flat_map(|site| wheels(site)).map(Some));
            folders.push(Some(prefix.join("lib")));
        }
        folders
    }

    /// Names to open, the first that opens wins, none newer than `major_max`.
    pub fn candidates(&self, wanted: Wanted, major_max: u32) -> Vec<PathBuf> {
        let majors = (MAJOR_MIN..=major_max.max(MAJOR_MIN)).rev();
        let names: Vec<String> = majors
            .map(|major| format!("{}.so.{major}", wanted.stem()))
            .collect();
        let mut candidates = Vec::new();
        for folder in self.folders() {
            for name in &names {
                match &folder {
                    None => candidates.push(PathBuf::from(name)),
                    Some(folder) => {
                        let path = folder.join(name);
                        if path.is_file() && !candidates.contains(&path) {
                            candidates.push(path);
                        }
                    }
                }
            }
        }
        candidates
    }

    /// Opens every library there is, in the order in which they are preferred; stops when `use_it`
    /// takes one.
    ///
    /// # Errors
    /// None that is taken: what to install.
    pub fn find<T>(
        &self,
        wanted: Wanted,
        driver: Version,
        mut use_it: impl FnMut(Opened) -> Result<Option<T>>,
    ) -> Result<T> {
        let mut tried = Vec::new();
        for path in self.candidates(wanted, driver.major) {
            preload_beside(&path, wanted);
            match open(&path) {
                Ok(library) => {
                    let opened = Opened {
                        path: path.clone(),
                        library,
                    };
                    match use_it(opened) {
                        Ok(Some(taken)) => return Ok(taken),
                        Ok(None) => {}
                        Err(error) => tried.push(format!("{}: {error:#}", path.display())),
                    }
                }
                // On the loader's path it may just not be.
                Err(error) if path.components().count() > 1 => {
                    let error = Error::from(error);
                    tried.push(format!("{}: {error:#}", path.display()));
                }
                Err(_) => {}
            }
        }
        tried.extend(self.newer(wanted, driver));
        if let Some(given) = &self.given {
            tried.push(format!("{} was searched", given.display()));
        }
        let tried = match tried.is_empty() {
            true => "none".to_owned(),
            false => tried.join("; "),
        };
        bail!(
            "expected {} ({}.so, CUDA {MAJOR_MIN} to {}), found {tried}; install it with `pip install {} {}` or a CUDA toolkit, or say where it lies with --cuda-libs DIR",
            wanted.what(),
            wanted.stem(),
            driver.major,
            Wanted::Nvrtc.package(driver.major),
            Wanted::CublasLt.package(driver.major)
        )
    }

    /// Libraries that are passed over, for they are newer than the driver.
    fn newer(&self, wanted: Wanted, driver: Version) -> Vec<String> {
        let next = driver.major + 1;
        let name = format!("{}.so.{next}", wanted.stem());
        let folders = self.folders().into_iter().flatten();
        let paths = folders.map(|folder| folder.join(&name));
        let there = paths.filter(|path| path.is_file());
        there
            .map(|path| {
                format!(
                    "{}, which a driver for CUDA {} doesn't serve",
                    path.display(),
                    driver.major
                )
            })
            .collect()
    }
}

/// Opens a library for good: what NVIDIA's libraries register when they are opened, threads and the
/// end of the program may still call when they are closed.
fn open(path: &Path) -> Result<Library, libloading::Error> {
    /// Of glibc's dlfcn.h, `RTLD_NODELETE`.
    const STAYS: std::ffi::c_int = 0x1000;
    // SAFETY: they do nothing but set themselves up when they are opened.
    let opened = unsafe { unix::Library::open(Some(path), unix::RTLD_LAZY | STAYS) };
    opened.map(Library::from)
}

/// NVRTC opens a second library by its bare name. One that is open already is found wherever it
/// lies.
fn preload_beside(path: &Path, wanted: Wanted) {
    let Some(folder) = path.parent().filter(|_| wanted == Wanted::Nvrtc) else {
        return;
    };
    for builtins in below(folder, "libnvrtc-builtins.so.*") {
        // It stays open; where it doesn't open, NVRTC says so.
        let _ = open(&builtins);
    }
}

/// What lies below a folder by a pattern.
fn below(folder: &Path, pattern: &str) -> Vec<PathBuf> {
    let folder = Pattern::escape(&folder.to_string_lossy());
    let found = glob::glob(&format!("{folder}/{pattern}"));
    found.into_iter().flatten().flatten().collect()
}

/// Prefixes of the Pythons on a path: `PREFIX/bin/python3`.
fn prefixes_of_pythons(path: Option<OsString>) -> Vec<PathBuf> {
    let folders = path.iter().flat_map(std::env::split_paths);
    let folders: Vec<PathBuf> = folders
        .filter(|folder| folder.join("python3").exists())
        .collect();
    folders
        .iter()
        .filter_map(|folder| folder.parent().map(Path::to_path_buf))
        .collect()
}

/// Folders of installed packages below a prefix, the newest Python's first.
fn packages(prefix: &Path) -> Vec<PathBuf> {
    let mut sites = Vec::new();
    for name in ["lib/python3*/site-packages", "lib/python3*/dist-packages"] {
        sites.extend(below(prefix, &format!("{name}/nvidia")));
    }
    sites.sort();
    sites.reverse();
    sites
}

/// Folders of libraries below `nvidia` among installed packages. `cu13` holds all of that version.
fn wheels(nvidia: &Path) -> Vec<PathBuf> {
    let mut found = below(nvidia, "*/lib");
    found.sort();
    found
}

/// A library that is open.
#[derive(Debug)]
pub struct Opened {
    pub path: PathBuf,
    pub library: Library,
}

impl Opened {
    /// A function of the library.
    ///
    /// # Safety
    /// `F` is its type.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: as the caller says; the library stays open as long as what is made of it.
        let found = unsafe { self.library.get::<F>(name.as_bytes()) };
        found.map(|f| *f).map_err(|error| error.into())
    }
}

/// Declares the functions of a library that are used: one field each.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name {
            // SAFETY: to be called as NVIDIA's header says.
            $(pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            pub path: PathBuf,
            _library: Library,
        }

        impl $name {
            /// # Errors
            /// A library that lacks one of them.
            pub fn new(opened: Opened) -> Result<$name> {
                Ok($name {
                    // SAFETY: the types are those of NVIDIA's headers.
                    $($field: unsafe { opened.function($symbol)? },)*
                    path: opened.path,
                    _library: opened.library,
                })
            }
        }
    };
}

/// A program that NVRTC compiles.
pub type Program = *mut c_void;
type Text = *const c_char;

/// Tells how long a result of a program is.
///
/// # Safety
/// With a program that was compiled.
pub type SizeGetter = unsafe extern "C" fn(Program, *mut usize) -> c_int;

/// Writes a result of a program.
///
/// # Safety
/// With room for as many bytes as its size getter told.
pub type Getter = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

type Texts = *const *const c_char;

functions! {
    /// NVRTC, by its header nvrtc.h; 0 is success.
    NvrtcLibrary {
        version = "nvrtcVersion": fn(*mut c_int, *mut c_int) -> c_int;
        arch_count = "nvrtcGetNumSupportedArchs": fn(*mut c_int) -> c_int;
        archs = "nvrtcGetSupportedArchs": fn(*mut c_int) -> c_int;
        error_text = "nvrtcGetErrorString": fn(c_int) -> Text;
        create = "nvrtcCreateProgram": fn(*mut Program, Text, Text, c_int, Texts, Texts) -> c_int;
        destroy = "nvrtcDestroyProgram": fn(*mut Program) -> c_int;
        compile = "nvrtcCompileProgram": fn(Program, c_int, Texts) -> c_int;
        log_bytes = "nvrtcGetProgramLogSize": fn(Program, *mut usize) -> c_int;
        log = "nvrtcGetProgramLog": fn(Program, *mut c_char) -> c_int;
        cubin_bytes = "nvrtcGetCUBINSize": fn(Program, *mut usize) -> c_int;
        cubin = "nvrtcGetCUBIN": fn(Program, *mut c_char) -> c_int;
        ptx_bytes = "nvrtcGetPTXSize": fn(Program, *mut usize) -> c_int;
        ptx = "nvrtcGetPTX": fn(Program, *mut c_char) -> c_int;
    }
}

/// Gives back what the library made.
///
/// # Safety
/// Once, with a handle that its own create function made.
pub type Destroy = unsafe extern "C" fn(Handle) -> c_int;

/// Sets an attribute of what the library made.
///
/// # Safety
/// With as many bytes as the attribute has in the library's header.
pub type SetAttribute = unsafe extern "C" fn(Handle, c_int, Data, usize) -> c_int;

/// What cuBLASLt hands out; made and destroyed by it.
pub type Handle = *mut c_void;
type Data = *const c_void;

/// An algorithm as cuBLASLt keeps it; cublasLtMatmulAlgo_t.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Algorithm {
    pub data: [u64; 8],
}

/// cublasLtMatmulHeuristicResult_t.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Heuristic {
    pub algorithm: Algorithm,
    pub workspace_bytes: usize,
    pub state: c_int,
    pub waves: f32,
    pub reserved: [c_int; 4],
}

functions! {
    /// cuBLASLt, by its header cublasLt.h; 0 is success.
    LtLibrary {
        version = "cublasLtGetVersion": fn() -> usize;
        create = "cublasLtCreate": fn(*mut Handle) -> c_int;
        destroy = "cublasLtDestroy": fn(Handle) -> c_int;
        product_create = "cublasLtMatmulDescCreate": fn(*mut Handle, c_int, c_int) -> c_int;
        product_destroy = "cublasLtMatmulDescDestroy": fn(Handle) -> c_int;
        product_set = "cublasLtMatmulDescSetAttribute": fn(Handle, c_int, Data, usize) -> c_int;
        layout_create = "cublasLtMatrixLayoutCreate": fn(*mut Handle, c_int, u64, u64, i64) -> c_int;
        layout_destroy = "cublasLtMatrixLayoutDestroy": fn(Handle) -> c_int;
        wish_create = "cublasLtMatmulPreferenceCreate": fn(*mut Handle) -> c_int;
        wish_destroy = "cublasLtMatmulPreferenceDestroy": fn(Handle) -> c_int;
        wish_set = "cublasLtMatmulPreferenceSetAttribute": fn(Handle, c_int, Data, usize) -> c_int;
        heuristic = "cublasLtMatmulAlgoGetHeuristic": fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Heuristic, *mut c_int) -> c_int;
        check = "cublasLtMatmulAlgoCheck": fn(Handle, Handle, Handle, Handle, Handle, Handle, *const Algorithm, *mut Heuristic) -> c_int;
        setting = "cublasLtMatmulAlgoConfigGetAttribute": fn(*const Algorithm, c_int, *mut c_void, usize, *mut usize) -> c_int;
        multiply = "cublasLtMatmul": fn(Handle, Handle, Data, u64, Handle, u64, Handle, Data, u64, Handle, u64, Handle, *const Algorithm, u64, usize, Handle) -> c_int;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }

    #[test]
    fn the_given_folder_comes_first_and_newer_majors_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let given = root.join("given/libcublasLt.so.12");
        let toolkit = root.join("toolkit/lib64/libcublasLt.so.12");
        let newer = root.join("toolkit/lib64/libcublasLt.so.13");
        let site = root.join("env/lib/python3.11/site-packages/nvidia");
        let wheel = site.join("cublas/lib/libcublasLt.so.12");
        let conda = root.join("env/lib/libcublasLt.so.12");
        for path in [&given, &toolkit, &newer, &wheel, &conda] {
            touch(path);
        }
        let places = Places {
            given: Some(root.join("given")),
            toolkits: vec![root.join("toolkit")],
            environments: vec![root.join("env")],
        };
        let loader = |major: u32| PathBuf::from(format!("libcublasLt.so.{major}"));
        let on_12 = places.candidates(Wanted::CublasLt, 12);
        assert_eq!(
            on_12,
            [
                given.clone(),
                toolkit.clone(),
                loader(12),
                wheel.clone(),
                conda.clone()
            ]
        );
        let on_13 = places.candidates(Wanted::CublasLt, 13);
        assert_eq!(
            on_13,
            [given, newer, toolkit, loader(13), loader(12), wheel, conda]
        );
    }

    #[test]
    fn a_given_environment_is_searched_for_wheels() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let all = root.join("lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
        let bare = root.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        for path in [&all, &bare] {
            touch(path);
        }
        let places = Places {
            given: Some(root.to_path_buf()),
            ..Places::default()
        };
        let found = places.candidates(Wanted::Nvrtc, 13);
        assert_eq!(found[..2], [bare, all]);
    }

    #[test]
    fn what_is_missing_is_named_with_what_to_install() {
        let driver = Version {
            major: 12,
            minor: 4,
        };
        let none = |_: Opened| Ok(None::<()>);
        let places = Places::default();
        let error = places.find(Wanted::CublasLt, driver, none).unwrap_err();
        let text = error.to_string();
        let install = "pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12";
        assert!(text.contains(install), "{text}");
        assert!(text.contains("--cuda-libs"), "{text}");
    }

    #[test]
    fn libraries_that_are_there_and_no_use_are_named() {
        // Brackets are plain letters in a folder's name.
        let folder = tempfile::Builder::new().prefix("[libs]").tempdir().unwrap();
        let damaged = folder.path().join("nvidia/cublas/lib/libcublasLt.so.12");
        let newer = folder.path().join("libcublasLt.so.13");
        touch(&damaged);
        touch(&newer);
        let places = Places {
            given: Some(folder.path().to_path_buf()),
            ..Places::default()
        };
        let driver = Version {
            major: 12,
            minor: 4,
        };
        let none = |_: Opened| Ok(None::<()>);
        let error = places.find(Wanted::CublasLt, driver, none).unwrap_err();
        let text = error.to_string();
        for path in [&damaged, &newer] {
            assert!(text.contains(&path.display().to_string()), "{text}");
        }
        assert!(text.contains("too short"), "the loader's own words: {text}");
    }
}
