from pydantic import BaseModel


class SumsConfig(BaseModel):
    rows: int = 81


class MomentumConfig(BaseModel):
    momentum: float = 0.9


class DiaryConfig(BaseModel):
    file: str
