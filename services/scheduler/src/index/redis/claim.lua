-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted
-- ARGV[1] owner  [2] prefix of other keys
-- Returns the checkpoint and, if there is one, its seal and the format of the shard. HDEL comes first: a full Redis never refuses it, and
-- refuses no write of a script that has already written.
redis.call('HDEL', KEYS[1], 'cleared')
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
local found = mark()
if not found[1] then
  return found
end

-- Up to the limits here and below, counting takes less than 100 ms. In a larger shard, a lost key is detected when one of its
-- jobs is queried.
local waiting
if redis.call('ZCARD', KEYS[2]) <= 30000 then
  waiting = 0
  local flows = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
  for i, size in ipairs(sizes_of(flows, 1, 2)) do
    local set = ARGV[2] .. 'due:' .. flows[i * 2 - 1]
    local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2]
    if redis.call('ZCARD', set) ~= tonumber(size) or first ~= flows[i * 2] then
      return without_mark()
    end
    waiting = waiting + size
  end
end

-- Each job has a due or end time and a record, so these numbers are equal.
if waiting and redis.call('SCARD', KEYS[5]) <= 100000 then
  local records = 0
  for _, bucket in ipairs(redis.call('SMEMBERS', KEYS[5])) do
    records = records + redis.call('HLEN', ARGV[2] .. 'job:' .. bucket)
  end
  if records ~= waiting + redis.call('ZCARD', KEYS[4]) then
    return without_mark()
  end
end
found[3] = redis.call('HGET', KEYS[1], 'seal')
found[4] = redis.call('HGET', KEYS[1], 'format')
return found
