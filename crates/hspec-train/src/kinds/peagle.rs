//! P-EAGLE: pairs at several depths in one pass. Deeper pairs are thinned out ([`Cod`]); each is held against
//! the target's law behind the token that it stands for (speculators: the divergence is the objective, every
//! depth weighs the same).

use super::{Learner, Start, eagle3};
use crate::{
    features::Reads,
    loss::Slots,
    pack::{Draw, Forward, Judge, Packed, indices, judged},
};
use burn::{module::AutodiffModule, tensor::backend::AutodiffBackend};
use hspec_core::{
    Result,
    checkpoint::StoreAs,
    drafter::{
        DraftVocab,
        eagle3::Eagle3Model,
        peagle::{Cod, PEagle, PackedPairs},
    },
    target::Target,
};
use std::path::Path;

impl<B: AutodiffBackend> Learner<B> for PEagle<B> {
    type Module = Eagle3Model<B>;
    type Drafter = PEagle<B::InnerBackend>;

    fn fresh(start: Start<'_, B::InnerBackend>) -> Result<Self::Drafter> {
        let file = start.file;
        PEagle::new(eagle3::trunk(start)?, file)
    }

    fn load(dir: &Path, target: &Target<B::InnerBackend>) -> Result<Self::Drafter> {
        PEagle::load(dir, Some(target), target.device())
    }

    fn save(drafter: &Self::Drafter, dir: &Path, store: StoreAs) -> Result<()> {
        drafter.save(dir, store, false)
    }

    fn vocab(drafter: &Self::Drafter) -> &DraftVocab {
        &drafter.trunk.vocab
    }

    fn reads(drafter: &Self::Drafter) -> Reads {
        Reads { hidden: drafter.trunk.shape.feature_layers.clone(), kv: Vec::new() }
    }

    fn learner(drafter: &Self::Drafter, device: &B::Device, file: &Path) -> Result<Self> {
        PEagle::new(eagle3::learning(&drafter.trunk, device)?, file)
    }

    fn teach(&self, drafter: &mut Self::Drafter) {
        drafter.trunk.model = self.trunk.model.valid();
    }

    fn module(&self) -> &Self::Module {
        &self.trunk.model
    }

    fn replace(&mut self, module: Self::Module) {
        self.trunk.model = module;
    }

    fn first_slot(&self) -> usize {
        0
    }

    fn forward(&self, row: &Packed<B>, draw: &Draw, judge: &Judge<B::InnerBackend>) -> Option<Forward<B>> {
        let shape = &self.trunk.shape;
        let pairs = eagle3::RowPairs::new(row);
        let supervised: Vec<bool> = pairs.at.iter().map(|&at| row.loss_mask[at + 1]).collect();
        let cod = Cod { depths: shape.max_draft, ..Cod::default() };
        // The row's number keeps what two rows draw apart.
        let samples = cod.sample(&supervised, &pairs.documents, draw.seed ^ (draw.row << 32));
        let reached = samples.anchors.iter().zip(&samples.depths).map(|(a, d)| a + d);
        let mask: Vec<bool> = reached.clone().map(|pair| supervised[pair]).collect();
        if !mask.contains(&true) {
            return None;
        }
        let wanted: Vec<usize> = reached.map(|pair| pairs.at[pair] + 1).collect();
        let features = row.fused.clone().select(0, indices(&pairs.at, &row.fused.device()));
        let positions: Vec<usize> =
            pairs.at.iter().map(|&at| row.positions[at] + shape.first_position).collect();
        let packed =
            PackedPairs { features, next: &pairs.next, positions: &positions, documents: &pairs.documents };
        let logits = PEagle::forward(self, &packed, &samples);
        let n = samples.depths.len();
        let (table, rows) = judged(row.last.clone().inner(), &wanted, judge);
        Some(Forward {
            logits: logits.unsqueeze_dim::<3>(1).into(),
            confidence: None,
            base: None,
            table,
            anchors: samples.anchors.iter().map(|&pair| pairs.at[pair] + 1).collect(),
            rows,
            slots: Slots { number: samples.depths, first: 0, means: 1 },
            mask: row.flags(mask.into_iter(), n, 1),
        })
    }
}
