//! Devices that users rent, by their makers' figures: dense peaks, memory, bandwidth.
//!
//! Every figure is the maker's, for dense matrices: where a datasheet states a peak "with
//! sparsity", half of it stands here. None of them was measured by kdscore.

/// One device model. Peaks in TFLOP/s with f32 accumulation, memory and bandwidth in GB and GB/s
/// of 10^9 bytes, as datasheets give them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Gpu {
    pub name: &'static str,
    /// Other names for the same: shorter ones, and what its driver calls it.
    pub aliases: &'static [&'static str],
    /// `None`: the device has no bf16 products.
    pub bf16_tflops: Option<f64>,
    pub fp8_tflops: Option<f64>,
    pub memory_gb: f64,
    pub bandwidth_gb_s: f64,
    /// The document that states them.
    pub source: &'static str,
}

impl Gpu {
    /// The device called `name`, whatever its spaces, hyphens and capitals.
    pub fn find(name: &str) -> Option<&'static Gpu> {
        let wanted = plain(name);
        TABLE.iter().find(|gpu| {
            let mut names = gpu.aliases.iter().chain([&gpu.name]);
            names.any(|name| plain(name) == wanted)
        })
    }

    pub fn memory_bytes(&self) -> u64 {
        (self.memory_gb * 1e9) as u64
    }
}

fn plain(name: &str) -> String {
    let kept = name.chars().filter(char::is_ascii_alphanumeric);
    let text: String = kept.map(|c| c.to_ascii_lowercase()).collect();
    text.strip_prefix("nvidia").unwrap_or(&text).to_owned()
}

/// name, aliases, bf16, fp8, memory, bandwidth, source
const fn gpu(
    name: &'static str,
    aliases: &'static [&'static str],
    [bf16_tflops, fp8_tflops]: [Option<f64>; 2],
    [memory_gb, bandwidth_gb_s]: [f64; 2],
    source: &'static str,
) -> Gpu {
    Gpu {
        name,
        aliases,
        bf16_tflops,
        fp8_tflops,
        memory_gb,
        bandwidth_gb_s,
        source,
    }
}

/// By maker and age, newest first.
pub const TABLE: &[Gpu] = &[
    gpu(
        "B300",
        &["B300 SXM", "HGX B300"],
        [Some(2250.0), Some(4500.0)],
        [288.0, 8000.0],
        "NVIDIA Blackwell Ultra datasheet, HGX B300",
    ),
    gpu(
        "GB200",
        &["GB200 NVL72"],
        [Some(2500.0), Some(5000.0)],
        [186.0, 8000.0],
        "NVIDIA GB200 NVL72 datasheet, one of its 72",
    ),
    gpu(
        "B200",
        &["B200 SXM", "HGX B200"],
        [Some(2250.0), Some(4500.0)],
        [180.0, 8000.0],
        "NVIDIA DGX B200 datasheet, an eighth of the system",
    ),
    gpu(
        "H200 SXM",
        &["H200"],
        [Some(989.5), Some(1979.0)],
        [141.0, 4800.0],
        "NVIDIA H200 Tensor Core GPU datasheet",
    ),
    gpu(
        "H200 NVL",
        &[],
        [Some(835.5), Some(1670.5)],
        [141.0, 4800.0],
        "NVIDIA H200 Tensor Core GPU datasheet, NVL",
    ),
    gpu(
        "H100 SXM",
        &["H100", "H100 SXM5", "H100 80GB HBM3"],
        [Some(989.4), Some(1978.9)],
        [80.0, 3350.0],
        "NVIDIA H100 Tensor Core GPU architecture whitepaper, table 1, and datasheet",
    ),
    gpu(
        "H100 PCIe",
        &[],
        [Some(756.0), Some(1513.0)],
        [80.0, 2000.0],
        "NVIDIA H100 Tensor Core GPU datasheet, PCIe",
    ),
    gpu(
        "H100 NVL",
        &[],
        [Some(835.5), Some(1670.5)],
        [94.0, 3900.0],
        "NVIDIA H100 Tensor Core GPU datasheet, NVL",
    ),
    gpu(
        "GH200",
        &["GH200 96GB", "GH200 480GB"],
        [Some(990.0), Some(1979.0)],
        [96.0, 4000.0],
        "NVIDIA GH200 Grace Hopper Superchip datasheet, 96 GB HBM3",
    ),
    gpu(
        "L40S",
        &[],
        [Some(362.0), Some(733.0)],
        [48.0, 864.0],
        "NVIDIA L40S datasheet",
    ),
    gpu(
        "L40",
        &[],
        [Some(181.0), Some(362.0)],
        [48.0, 864.0],
        "NVIDIA L40 datasheet",
    ),
    gpu(
        "L4",
        &[],
        [Some(121.0), Some(242.5)],
        [24.0, 300.0],
        "NVIDIA L4 datasheet",
    ),
    gpu(
        "RTX 6000 Ada",
        &["RTX 6000 Ada Generation"],
        [Some(364.2), Some(728.5)],
        [48.0, 960.0],
        "NVIDIA Ada architecture whitepaper for professional graphics",
    ),
    gpu(
        "RTX PRO 6000 Blackwell",
        &["RTX PRO 6000", "RTX PRO 6000 Blackwell Workstation Edition"],
        [Some(503.8), Some(1007.6)],
        [96.0, 1792.0],
        "NVIDIA RTX Blackwell PRO architecture whitepaper, Workstation Edition",
    ),
    gpu(
        "RTX 5090",
        &["5090", "GeForce RTX 5090"],
        [Some(209.5), Some(419.0)],
        [32.0, 1792.0],
        "NVIDIA RTX Blackwell architecture whitepaper, f32 accumulation",
    ),
    gpu(
        "RTX 4090",
        &["4090", "GeForce RTX 4090"],
        [Some(165.2), Some(330.3)],
        [24.0, 1008.0],
        "NVIDIA Ada architecture whitepaper, f32 accumulation",
    ),
    gpu(
        "RTX 3090",
        &["3090", "GeForce RTX 3090"],
        [Some(71.0), None],
        [24.0, 936.0],
        "NVIDIA Ampere GA102 architecture whitepaper, f32 accumulation",
    ),
    gpu(
        "A100 80GB SXM",
        &["A100", "A100 80GB", "A100 SXM", "A100-SXM4-80GB"],
        [Some(312.0), None],
        [80.0, 2039.0],
        "NVIDIA A100 Tensor Core GPU datasheet",
    ),
    gpu(
        "A100 80GB PCIe",
        &["A100 PCIe", "A100-PCIE-80GB"],
        [Some(312.0), None],
        [80.0, 1935.0],
        "NVIDIA A100 Tensor Core GPU datasheet",
    ),
    gpu(
        "A100 40GB",
        &[
            "A100 40GB SXM",
            "A100 40GB PCIe",
            "A100-SXM4-40GB",
            "A100-PCIE-40GB",
        ],
        [Some(312.0), None],
        [40.0, 1555.0],
        "NVIDIA A100 Tensor Core GPU datasheet, 40 GB",
    ),
    gpu(
        "RTX A6000",
        &["A6000"],
        [Some(154.8), None],
        [48.0, 768.0],
        "NVIDIA Ampere GA102 architecture whitepaper",
    ),
    gpu(
        "A40",
        &[],
        [Some(149.7), None],
        [48.0, 696.0],
        "NVIDIA A40 datasheet",
    ),
    gpu(
        "A30",
        &[],
        [Some(165.0), None],
        [24.0, 933.0],
        "NVIDIA A30 datasheet",
    ),
    gpu(
        "A10",
        &[],
        [Some(125.0), None],
        [24.0, 600.0],
        "NVIDIA A10 datasheet",
    ),
    gpu(
        "A10G",
        &[],
        [Some(70.0), None],
        [24.0, 600.0],
        "NVIDIA A10G datasheet, as Amazon EC2 G5 publishes it",
    ),
    gpu(
        "V100 32GB",
        &["V100", "V100 SXM2"],
        [None, None],
        [32.0, 900.0],
        "NVIDIA V100 datasheet; f16 products only",
    ),
    gpu(
        "T4",
        &[],
        [None, None],
        [16.0, 320.0],
        "NVIDIA T4 datasheet; f16 products only",
    ),
    gpu(
        "MI300X",
        &["AMD MI300X"],
        [Some(1307.4), Some(2614.9)],
        [192.0, 5300.0],
        "AMD Instinct MI300X datasheet",
    ),
    gpu(
        "MI325X",
        &["AMD MI325X"],
        [Some(1307.4), Some(2614.9)],
        [256.0, 6000.0],
        "AMD Instinct MI325X datasheet",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_finds_its_own_row_and_no_other() {
        for gpu in TABLE {
            for name in gpu.aliases.iter().chain([&gpu.name]) {
                assert_eq!(Gpu::find(name).map(|g| g.name), Some(gpu.name), "{name}");
            }
        }
        assert_eq!(Gpu::find("nvidia h100-sxm").unwrap().name, "H100 SXM");
        assert!(Gpu::find("H1").is_none());
    }

    #[test]
    fn figures_are_of_one_kind() {
        for gpu in TABLE {
            let (Some(bf16), Some(fp8)) = (gpu.bf16_tflops, gpu.fp8_tflops) else {
                continue;
            };
            // The same units, twice as fast on half the bits: a sparse figure would stand out.
            assert!((fp8 / bf16 - 2.0).abs() < 0.05, "{}", gpu.name);
        }
        assert!(TABLE.iter().all(|gpu| !gpu.source.is_empty()));
    }
}
