//! The driver as far as it is used here: a device, memory on it, pinned memory beside it, streams
//! of work, modules of kernels. Handles give back what they hold when they are dropped.
//!
//! Architecture invariant: a driver's function is called here and nowhere else. The driver is
//! looked for when it is first needed; without one the program runs on the CPU.

use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use cudarc::driver::result::{self, DriverError, device, event, module, primary_ctx, stream};
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute as Attribute, CUevent, CUevent_flags,
    CUevent_wait_flags, CUfunction, CUfunction_attribute as FunctionAttribute, CUmodule, CUstream,
};

/// A driver of 12.0 is the least that is served.
const VERSION_MIN: Version = Version {
    major: 12,
    minor: 0,
};

/// Compute capability of the oldest devices that are served: before, there were no bf16 products.
const ARCH_MIN: u32 = 80;

/// Of a driver or a library.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Names the call that failed.
trait Named<T> {
    fn named(self, call: &str) -> Result<T>;
}

impl<T> Named<T> for std::result::Result<T, DriverError> {
    fn named(self, call: &str) -> Result<T> {
        self.map_err(|error| {
            let text = |found: std::result::Result<&std::ffi::CStr, DriverError>| {
                found.map_or("unknown".into(), |s| s.to_string_lossy().into_owned())
            };
            let (name, meaning) = (text(error.error_name()), text(error.error_string()));
            anyhow!("CUDA: {call}: {name} ({meaning})")
        })
    }
}

pub fn is_there() -> bool {
    // SAFETY: it opens a library and closes it again.
    unsafe { sys::is_culib_present() }
}

/// The driver's version.
///
/// # Errors
/// No driver, or one that is too old or finds no device.
pub fn start() -> Result<Version> {
    anyhow::ensure!(
        is_there(),
        "expected NVIDIA's driver (libcuda.so.1), found none; install the driver of the GPU, or mount it into the container"
    );
    let mut number = 0;
    // SAFETY: writes one number, and may be called before anything else.
    unsafe { sys::cuDriverGetVersion(&raw mut number) }
        .result()
        .named("cuDriverGetVersion")?;
    let number = u32::try_from(number).unwrap_or(0);
    let version = Version {
        major: number / 1000,
        minor: number % 1000 / 10,
    };
    anyhow::ensure!(
        version >= VERSION_MIN,
        "expected a driver for CUDA {VERSION_MIN} or newer, found one for {version}; update NVIDIA's driver"
    );
    result::init()
        .named("cuInit")
        .context("the driver is there but finds no device it can use")?;
    Ok(version)
}

/// Devices that the driver shows.
pub fn device_count() -> Result<usize> {
    let count = device::get_count().named("cuDeviceGetCount")?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// A device that is in use.
pub struct Device {
    handle: CUdevice,
    context: CUcontext,
    pub ordinal: usize,
    pub name: String,
    /// Compute capability: 80, 89, 90, 100, ...
    pub arch: u32,
    pub multiprocessors: u32,
    pub driver: Version,
}

// SAFETY: a context may be used from every thread on which it is made current, which `bind` does
// before each call; the handles are never changed.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({} {})", self.ordinal, self.name)
    }
}

impl Device {
    /// # Errors
    /// A device that is not there, or that is held by somebody else.
    pub fn open(ordinal: usize, driver: Version) -> Result<Arc<Device>> {
        let handle = device::get(i32::try_from(ordinal)?).named("cuDeviceGet")?;
        let attribute = |attribute| -> Result<u32> {
            // SAFETY: the handle is the driver's own, from above.
            let value = unsafe { device::get_attribute(handle, attribute) };
            Ok(u32::try_from(value.named("cuDeviceGetAttribute")?)?)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let name = device::get_name(handle).named("cuDeviceGetName")?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // SAFETY: the handle is the driver's own; released in `drop`.
        let context = unsafe { primary_ctx::retain(handle) }.named("cuDevicePrimaryCtxRetain")?;
        Ok(Arc::new(Device {
            handle,
            context,
            ordinal,
            name,
            arch: major * 10 + minor,
            multiprocessors,
            driver,
        }))
    }

    /// # Errors
    /// A device that is older than what the kernels are written for.
    pub fn expect_served(&self) -> Result<()> {
        let version = |arch: u32| format!("{}.{}", arch / 10, arch % 10);
        anyhow::ensure!(
            self.arch >= ARCH_MIN,
            "expected compute capability {} or newer, found {} ({})",
            version(ARCH_MIN),
            version(self.arch),
            self.name
        );
        Ok(())
    }

    /// Makes the device the one that this thread's calls mean.
    fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained for as long as this value lives.
        unsafe { result::ctx::set_current(self.context) }.named("cuCtxSetCurrent")
    }

    /// Bytes that are free, and bytes there are.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        result::mem_get_info().named("cuMemGetInfo")
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; whatever was made in it holds this value and is gone.
        let _ = unsafe { primary_ctx::release(self.handle) };
    }
}

/// Device memory.
#[derive(Debug)]
pub struct Block {
    device: Arc<Device>,
    pub address: u64,
}

impl Block {
    /// # Errors
    /// Less memory than that.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Block> {
        device.bind()?;
        // SAFETY: freed once, in `drop`.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.named("cuMemAlloc")?;
        Ok(Block {
            device: device.clone(),
            address,
        })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated in `new`; cuMemFree waits for work that uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Host memory that the device can reach while the host goes on.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it is plain memory that one value owns.
unsafe impl Send for Pinned {}

impl Pinned {
    /// # Errors
    /// Less memory than that may be locked.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Pinned> {
        device.bind()?;
        // SAFETY: freed once, in `drop`.
        let start = unsafe { result::malloc_host(bytes.max(1), 0) }.named("cuMemHostAlloc")?;
        let start = start.cast::<u8>();
        // SAFETY: just allocated, as long as that; from here on every byte is initialised.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Pinned {
            device: device.clone(),
            start,
            bytes,
        })
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `start` is `bytes` long and initialised, and borrowed with `self`. Who asks for
        // it has waited for what the stream was told to do with that part of it.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated in `new`.
            let _ = unsafe { result::free_host(self.start.cast()) };
        }
    }
}

/// Work in order.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    raw: CUstream,
}

// SAFETY: the driver lets every thread use a stream; `bind` makes its context current.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(device: &Arc<Device>) -> Result<Stream> {
        device.bind()?;
        let raw = stream::create(stream::StreamKind::NonBlocking).named("cuStreamCreate")?;
        Ok(Stream {
            device: device.clone(),
            raw,
        })
    }

    /// For a library that puts work on the stream itself; binds the thread to the device.
    pub fn raw(&self) -> Result<CUstream> {
        self.device.bind()?;
        Ok(self.raw)
    }

    /// Until all is done.
    pub fn wait(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the stream lives.
        unsafe { stream::synchronize(self.raw) }.named("cuStreamSynchronize")
    }

    /// Lets what it is asked for from now on wait until another stream has come to that point.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.device.bind()?;
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live; the point is that of the event's last record, whatever follows.
        unsafe { stream::wait_event(self.raw, event.raw, flags) }.named("cuStreamWaitEvent")
    }

    /// Copies to the device.
    ///
    /// # Safety
    /// `to` is device memory of so many bytes, and `from` stays as it is until the stream has come
    /// past this.
    pub unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        self.device.bind()?;
        // SAFETY: as the caller says.
        unsafe { result::memcpy_htod_async(to, from, self.raw) }.named("cuMemcpyHtoDAsync")
    }

    /// Copies from the device; `to` holds the bytes once the stream has come past this.
    ///
    /// # Safety
    /// `from` is device memory of so many bytes, and nobody looks at `to` until then.
    pub unsafe fn download(&self, to: &mut [u8], from: u64) -> Result<()> {
        self.device.bind()?;
        // SAFETY: as the caller says.
        unsafe { result::memcpy_dtoh_async(to, from, self.raw) }.named("cuMemcpyDtoHAsync")
    }

    /// Copies on the device.
    ///
    /// # Safety
    /// Both are device memory of so many bytes, and don't overlap.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.device.bind()?;
        // SAFETY: as the caller says.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.raw) }.named("cuMemcpyDtoDAsync")
    }

    /// Sets bytes to 0.
    ///
    /// # Safety
    /// `at` is device memory of so many bytes.
    pub unsafe fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        self.device.bind()?;
        // SAFETY: as the caller says.
        unsafe { result::memset_d8_async(at, 0, bytes, self.raw) }.named("cuMemsetD8Async")
    }

    /// Runs a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in order, by size and layout, and what they point to
    /// is device memory as large as the kernel takes it for.
    pub unsafe fn launch(
        &self,
        function: &Function,
        launch: Launch,
        arguments: &[&dyn Argument],
    ) -> Result<()> {
        self.device.bind()?;
        let mut addresses: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| std::ptr::from_ref(*argument).cast_mut().cast())
            .collect();
        let Launch {
            grid: (x, y),
            block,
            shared_bytes,
        } = launch;
        // SAFETY: as the caller says; the driver copies the arguments before it returns.
        let done = unsafe {
            let (grid, block) = ((x, y, 1), (block.0, block.1, 1));
            let (raw, arguments) = (function.raw, &mut addresses);
            result::launch_kernel(raw, grid, block, shared_bytes, self.raw, arguments)
        };
        done.named("cuLaunchKernel")
            .with_context(|| format!("kernel {}, {launch:?}", function.name))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made in `new`. Waiting first: memory that its work uses may go next.
            unsafe {
                let _ = stream::synchronize(self.raw);
                let _ = stream::destroy(self.raw);
            }
        }
    }
}

/// A point of a stream, to wait for.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    raw: CUevent,
}

// SAFETY: a handle that is only handed to the driver.
unsafe impl Send for Event {}

impl Event {
    pub fn new(device: &Arc<Device>) -> Result<Event> {
        device.bind()?;
        let raw = event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).named("cuEventCreate")?;
        Ok(Event {
            device: device.clone(),
            raw,
        })
    }

    /// From now on this stands for what the stream has been asked for so far.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both live.
        unsafe { event::record(self.raw, stream.raw) }.named("cuEventRecord")
    }

    /// Until the stream has come this far.
    pub fn wait(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the event lives.
        unsafe { event::synchronize(self.raw) }.named("cuEventSynchronize")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made in `new`; a stream that has yet to come past it keeps what it needs.
            let _ = unsafe { event::destroy(self.raw) };
        }
    }
}

/// The shape of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    pub grid: (u32, u32),
    pub block: (u32, u32),
    pub shared_bytes: u32,
}

impl Launch {
    pub fn new(blocks: usize, threads: u32) -> Launch {
        Launch {
            grid: (count(blocks), 1),
            block: (threads, 1),
            shared_bytes: 0,
        }
    }
}

/// A count that a kernel or a grid takes.
///
/// # Panics
/// Beyond what any plan allows: token budgets are at most 2^31.
pub fn count<T: TryFrom<usize>>(n: usize) -> T {
    T::try_from(n).unwrap_or_else(|_| panic!("a count of {n} is more than a kernel takes"))
}

/// What may be handed to a kernel.
///
/// # Safety
/// It has the size and layout of the kernel's parameter, and no padding that matters.
pub unsafe trait Argument {}

// SAFETY: int and unsigned.
unsafe impl Argument for i32 {}
// SAFETY: long long.
unsafe impl Argument for i64 {}
// SAFETY: float.
unsafe impl Argument for f32 {}
// SAFETY: a device pointer.
unsafe impl Argument for u64 {}

/// A kernel of a module that stays loaded.
#[derive(Debug)]
pub struct Function {
    raw: CUfunction,
    name: String,
}

// SAFETY: a handle that is only handed to the driver.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Kernels on the device.
#[derive(Debug)]
pub struct Module {
    device: Arc<Device>,
    raw: CUmodule,
    file: &'static str,
}

// SAFETY: a handle that is only handed to the driver.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin, or PTX that ends in a zero byte. `file` names it in messages.
    pub fn load(device: &Arc<Device>, file: &'static str, image: &[u8]) -> Result<Module> {
        device.bind()?;
        // SAFETY: the driver reads as far as the image's own header says, or up to the zero.
        let raw = unsafe { module::load_data(image.as_ptr().cast()) }
            .named("cuModuleLoadData")
            .with_context(|| format!("{file}: the driver refuses the compiled kernels"))?;
        Ok(Module {
            device: device.clone(),
            raw,
            file,
        })
    }

    /// `shared_bytes`: dynamic shared memory that its launches take at most.
    pub fn function(&self, name: &str, shared_bytes: u32) -> Result<Function> {
        /// What every launch may take without asking.
        const ALWAYS: u32 = 48 << 10;
        self.device.bind()?;
        // SAFETY: the module is loaded.
        let raw = unsafe { module::get_function(self.raw, CString::new(name)?) }
            .named("cuModuleGetFunction")
            .with_context(|| format!("{}: kernel {name}", self.file))?;
        if shared_bytes > ALWAYS {
            let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = i32::try_from(shared_bytes)?;
            // SAFETY: the function was just found.
            unsafe { result::function::set_function_attribute(raw, attribute, bytes) }
                .named("cuFuncSetAttribute")
                .with_context(|| format!("kernel {name}: {bytes} bytes of shared memory"))?;
        }
        Ok(Function {
            raw,
            name: name.to_owned(),
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: loaded in `load`; its functions are not launched any more.
            let _ = unsafe { module::unload(self.raw) };
        }
    }
}
