//! A layer's experts on the device: tables of pointers to their weights, and where the choices of
//! a batch lie.

use super::arena::Room;
use super::driver::{Argument, count};
use super::kernels::tile_rows;
use super::tensor::Kind;
use super::weights::DeviceWeight;
use crate::backend::{ExpertSizes, Mlp, RouterRule, RouterScore};

/// RouterRule of experts.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceRouter {
    experts: i32,
    chosen: i32,
    score: i32,
    renormalise: i32,
    groups: i32,
    groups_kept: i32,
    scale: f32,
}
// SAFETY: seven numbers of four bytes, as in experts.cu.
unsafe impl Argument for DeviceRouter {}

impl DeviceRouter {
    pub fn new(rule: &RouterRule, experts: usize) -> DeviceRouter {
        DeviceRouter {
            experts: count(experts),
            chosen: count(rule.chosen),
            score: match rule.score {
                RouterScore::Softmax => 0,
                RouterScore::SoftmaxOfChosen => 1,
                RouterScore::Sigmoid => 2,
                RouterScore::SigmoidOfChosen => 3,
            },
            renormalise: i32::from(rule.renormalise),
            groups: count(rule.groups.map_or(0, |groups| groups.count)),
            groups_kept: count(rule.groups.map_or(0, |groups| groups.kept)),
            scale: rule.scale,
        }
    }
}

/// Pointers to the same projection of every expert, and to its biases where there are any.
#[derive(Debug)]
pub struct PointerTable {
    pub weights: Room,
    pub biases: Option<Room>,
    /// Outputs of each.
    pub outputs: usize,
}

impl PointerTable {
    /// As `expert_multiply` takes it.
    pub fn addresses(&self) -> [u64; 2] {
        [
            self.weights.address(),
            self.biases.as_ref().map_or(0, Room::address),
        ]
    }
}

/// A layer's experts.
#[derive(Debug)]
pub struct DeviceExperts {
    pub correction: Option<DeviceWeight>,
    pub gate: Option<PointerTable>,
    pub up: PointerTable,
    pub down: PointerTable,
    /// What the tables point to.
    pub list: Vec<Mlp<DeviceWeight>>,
}

/// Room for the choices of the largest batch.
#[derive(Debug)]
pub struct Routing {
    /// `None` where no layer has experts.
    pub room: Option<Room>,
    pub layout: RoutingLayout,
}

/// Where the arrays of a routing lie behind one another, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RoutingLayout {
    choices_max: usize,
    experts_max: usize,
    kind: Option<Kind>,
}

/// Where the choices of a batch lie.
#[derive(Clone, Copy, Debug)]
pub struct Choices {
    pub experts: u64,
    pub weights: u64,
    pub places: u64,
    pub sources: u64,
    pub counts: u64,
    pub tiles: u64,
    /// Rows · chosen.
    pub count: usize,
    pub chosen: usize,
    /// Tiles that there may be.
    pub tile_count: usize,
}

impl RoutingLayout {
    pub fn new(rows_max: usize, sizes: &ExpertSizes, kind: Kind) -> RoutingLayout {
        RoutingLayout {
            choices_max: rows_max * sizes.chosen,
            experts_max: sizes.count,
            kind: Some(kind),
        }
    }

    /// Offsets of experts, weights, places, sources, counts and tiles, and the end.
    fn offsets(&self) -> [usize; 7] {
        let tiles = self.tiles_max();
        let four = self.choices_max * 4;
        let sizes = [four, four, four, four, self.experts_max * 4, tiles * 12];
        let mut offsets = [0; 7];
        for (i, size) in sizes.into_iter().enumerate() {
            offsets[i + 1] = offsets[i] + size.next_multiple_of(16);
        }
        offsets
    }

    /// Tiles that a batch may have.
    pub fn tiles_max(&self) -> usize {
        self.tiles(self.choices_max, self.experts_max)
    }

    fn tiles(&self, choices: usize, experts: usize) -> usize {
        choices / self.kind.map_or(1, tile_rows) + experts
    }

    pub fn bytes(&self) -> usize {
        self.offsets()[6]
    }

    /// # Panics
    /// More choices or experts than the layout is made for.
    pub fn choices(&self, start: u64, rows: usize, chosen: usize, experts: usize) -> Choices {
        let count = rows * chosen;
        assert!(
            count <= self.choices_max && experts <= self.experts_max,
            "experts: more choices than planned"
        );
        let [experts_at, weights, places, sources, counts, tiles, _] =
            self.offsets().map(|offset| start + offset as u64);
        Choices {
            experts: experts_at,
            weights,
            places,
            sources,
            counts,
            tiles,
            count,
            chosen,
            tile_count: self.tiles(count, experts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_any_batch_fit_the_layout() {
        let sizes = ExpertSizes {
            count: 6,
            chosen: 2,
            hidden: 64,
            inner: 32,
            weighs_inputs: false,
        };
        let layout = RoutingLayout::new(300, &sizes, Kind::Bf16);
        let all = layout.choices(0, 300, 2, 6);
        // 600 choices in tiles of 128: four whole ones, and one more for each expert.
        assert_eq!((all.count, all.tile_count), (600, 10));
        assert_eq!(
            layout.bytes() as u64,
            all.tiles + (10 * 12u64).next_multiple_of(16)
        );
        let few = layout.choices(1000, 3, 1, 4);
        assert_eq!((few.count, few.tile_count, few.experts), (3, 4, 1000));
        assert_eq!(few.weights - few.experts, 2400);
    }
}
